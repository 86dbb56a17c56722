"""Read latent attention, and experts in groups, from a `config.json` of DeepSeek's. No torch."""

import math
from collections.abc import Mapping
from dataclasses import replace

from slipstream.kernels.experts.spec import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, Routing, Score
from slipstream.layers.dims import ExpertsConfig, LatentConfig
from slipstream.models.axes import Axes, TensorNames
from slipstream.models.reader import Reader
from slipstream.models.ropes import rope_key

# What is read here.
EXPERT_KEYS = "first_k_dense_replace moe_layer_freq moe_intermediate_size n_group topk_group "
EXPERT_KEYS += "n_routed_experts n_shared_experts routed_scaling_factor topk_method norm_topk_prob "
EXPERT_KEYS += "num_experts_per_tok scoring_func num_mtp_layers num_nextn_predict_layers "
EXPERT_KEYS += "num_local_experts num_experts"
LATENT_KEYS = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim attention_bias"
KEYS = f"{LATENT_KEYS} {EXPERT_KEYS}"
_MOST = 1 << 18  # of sizes, and of a factor


def derived_experts(config: Reader) -> Mapping[str, object]:
    """Return nothing; refuse keys of experts that contradict each other.

    `num_local_experts`, which transformers 5 may write, is another name of `n_routed_experts`.
    """
    config.refuse_unless("moe_layer_freq", 1)
    for key in ("num_local_experts", "num_experts"):
        config.refuse_unless(key, config.get("n_routed_experts"))
    return {}


def derived(config: Reader) -> Mapping[str, object]:
    """Return sizes of the cache: one head, of whose numbers K has the first half, V the last."""
    derived_experts(config)
    row = config.whole("kv_lora_rank", most=_MOST) + config.whole("qk_rope_head_dim", most=_MOST)
    if row % 4:
        raise config.refusal("kv_lora_rank", f"gives rows of {row}, which are no multiple of 4")
    return {"num_key_value_heads": 1, "head_dim": row // 2}


def names(config: Reader) -> TensorNames:
    """Return where tensors are; layers behind the last predict further tokens, and are not read."""
    behind = f"model.layers.{config.whole('num_hidden_layers')}."
    return TensorNames({"mlp.shared_expert": "mlp.shared_experts"}, unused=(behind,))


def latent_axes(config: Reader, routing: Routing | None, interleaved: bool) -> Axes:
    """Return the axes, all but those of the router's scores; without a routing, with MLPs."""
    latent = LatentConfig(
        config.whole("kv_lora_rank"),
        config.whole("q_lora_rank", most=_MOST) if config.has("q_lora_rank") else 0,
        config.whole("qk_nope_head_dim", most=_MOST),
        config.whole("qk_rope_head_dim"),
        config.whole("v_head_dim", most=_MOST),
        interleaved,
    )
    bias = config.flag("attention_bias", default=False)
    experts, dense = _experts(config, routing) if routing else (None, frozenset[int]())
    return Axes(
        out_bias=bias,
        attention_scale=_scale(config, latent.plain + latent.rotated),
        latent=latent,
        experts=experts,
        dense_layers=dense,
    )


def _experts(config: Reader, routing: Routing) -> tuple[ExpertsConfig, frozenset[int]]:
    """Read the sizes of experts, and which layers have none: the first."""
    dense = 0
    if config.has("first_k_dense_replace") and config.get("first_k_dense_replace") != 0:
        count = config.whole("num_hidden_layers")
        dense = min(config.whole("first_k_dense_replace"), count)
    inner = config.whole("moe_intermediate_size")
    shared = inner * config.whole("n_shared_experts") if config.has("n_shared_experts") else 0
    return ExpertsConfig(routing, inner, shared_size=shared), frozenset(range(dense))


def sigmoid_routing(config: Reader, normalises: bool) -> Routing:
    """Read how experts are chosen by logistic scores, in groups; `normalises` is the default."""
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    routing = Routing(
        config.whole("n_routed_experts", most=MAX_EXPERTS),
        config.whole("num_experts_per_tok", most=MAX_TOP_K),
        Score.SIGMOID,
        normalises=config.flag("norm_topk_prob", default=normalises),
        factor=config.positive("routed_scaling_factor", 1.0),
    )
    return with_groups(config, routing)


def sigmoid_experts(config: Reader, normalises: bool) -> tuple[ExpertsConfig, frozenset[int]]:
    """Read experts by logistic scores with corrections, and which layers have none."""
    experts, dense = _experts(config, sigmoid_routing(config, normalises))
    return replace(experts, corrected=True), dense


def with_groups(config: Reader, routing: Routing) -> Routing:
    """Return the routing with the groups of experts that are chosen first, if there are such."""
    if routing.top_k > routing.num_experts:
        raise config.refusal("num_experts_per_tok", f"is above {routing.num_experts} experts")
    groups = config.whole("n_group", most=MAX_GROUPS) if config.has("n_group") else 1
    if groups == 1:
        return routing
    best, size = config.whole("topk_group", most=groups), routing.num_experts // groups
    if routing.num_experts % groups:
        raise config.refusal("n_group", f"does not divide {routing.num_experts} experts")
    if size == 1 and routing.score is Score.SIGMOID:
        raise config.refusal("n_group", "leaves groups of one expert, which count by two")
    if size * best < routing.top_k:
        raise config.refusal("topk_group", f"leaves fewer than {routing.top_k} experts")
    return replace(routing, groups=groups, top_groups=best)


def _scale(config: Reader, size: int) -> float:
    """Return the factor of scores: that of the heads' size, times that of a stretched rotation."""
    rope = config.child(rope_key(config))
    kind = rope.data.get("rope_type") or rope.data.get("type") or "default"
    if kind == "default" or not rope.data.get("mscale_all_dim"):
        return float(size**-0.5)
    factor, weight = rope.positive("factor"), rope.positive("mscale_all_dim", most=_MOST)
    magnitude = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(size**-0.5) * magnitude**2
