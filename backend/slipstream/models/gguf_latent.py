"""Read latent attention, and experts with shared ones, from the metadata of a GGUF file. No torch.

llama.cpp calls all models with latent attention `deepseek2`; how scores of experts are made tells
the second version from the third.
"""

from slipstream.models.gguf_form import MAGNITUDE, GgufForm, GgufKeys

SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`


def shared_experts(keys: GgufKeys) -> dict[str, object]:
    """Return the keys of experts: routed in groups or not, and shared ones.

    Files without counts of groups are read as llama.cpp reads them: all experts are one group.
    """
    gating = keys.get("expert_gating_func")
    if gating not in (None, 0, SOFTMAX, SIGMOID):
        raise keys.refusal("expert_gating_func", f"is not implemented; {SOFTMAX} and {SIGMOID} are")
    dense = keys.get("leading_dense_block_count")
    found: dict[str, object] = {
        "n_routed_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "n_shared_experts": keys.whole("expert_shared_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm") is True,
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "first_k_dense_replace": keys.whole("leading_dense_block_count") if dense else 0,
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
    }
    is_grouped = found["n_group"] != 1
    if gating != SIGMOID:
        found["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    return found


def logistic_experts(keys: GgufKeys) -> dict[str, object]:
    """Return the keys of experts by logistic scores, in files of which some do not say so."""
    if keys.get("expert_gating_func") not in (None, 0, SIGMOID):
        raise keys.refusal("expert_gating_func", f"is not implemented; {SIGMOID} is")
    found = shared_experts(keys)
    found.pop("topk_method", None)
    return found


def _latent(keys: GgufKeys) -> dict[str, object]:
    """Return the sizes of latents and of heads; None is what does not say one.

    Newer files have the sizes of rows of the cache as those of heads, and `..._mla` beside them.
    """
    rotated = keys.whole("rope.dimension_count")
    names = ("key_length", "value_length")
    suffix = "_mla" if keys.has("attention.key_length_mla") else ""
    size, value = (keys.whole(f"attention.{name}{suffix}") for name in names)
    rank = keys.whole("attention.kv_lora_rank")
    if size <= rotated:
        raise keys.refusal(f"attention.key_length{suffix}", f"is not above {rotated} that rotate")
    for name, own in zip(names, (rank + rotated, rank), strict=True):
        if suffix and keys.whole(f"attention.{name}", own) != own:
            raise keys.refusal(f"attention.{name}", f"is not {own}, that of a row of the cache")
    has_rank = keys.has("attention.q_lora_rank")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.whole("attention.q_lora_rank") if has_rank else None,
        "qk_nope_head_dim": size - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "head_dim": None,
        "num_key_value_heads": None,
    }


def _magnitude(keys: GgufKeys) -> dict[str, object]:
    """Return how much a stretched rotation adds to scores of latents; cosines and sines stay.

    llama.cpp's converter writes a tenth of `mscale_all_dim`.
    """
    if keys.get("rope.scaling.type") != "yarn" or not keys.has(MAGNITUDE):
        return {}
    weight = 10 * keys.positive(MAGNITUDE)
    return {"mscale": weight, "mscale_all_dim": weight}


def latent_form(gating: int) -> GgufForm:
    """Return the form of files with this `expert_gating_func`; that of softmax may be left out."""
    return GgufForm(
        "deepseek2",
        told_by=("expert_gating_func", gating),
        has_experts=True,
        experts=shared_experts,
        is_latent=True,
        config=_latent,
        rope=_magnitude,
    )
