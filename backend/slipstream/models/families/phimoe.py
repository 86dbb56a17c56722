"""Phi-3.5-MoE (Abdin et al., 2024): layer norms, and two experts by a sparse mixer."""

from collections.abc import Mapping

from slipstream.kernels.experts.spec import Score
from slipstream.models.axes import Axes, NormKind, TensorNames
from slipstream.models.config_class import read_config_class
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.families.mixtral import NAMES
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader
from slipstream.models.ropes import rope_key

ROPE_FACTORS = "rope_factors_long.weight"  # of a GGUF file
MAGNITUDES = ("short_mscale", "long_mscale")  # of cosines and sines


def derived(config: Reader) -> Mapping[str, object]:
    """Return the rotation with what this class calls its magnitudes as that of others."""
    key = rope_key(config)
    rope = config.child(key)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {}
    short = rope.positive("short_mscale")
    if rope.positive("long_mscale") != short:
        raise rope.refusal("long_mscale", f"is not short_mscale = {short}: not implemented")
    kept = {name: value for name, value in rope.data.items() if name not in MAGNITUDES}
    return {key: kept | {"attention_factor": short}}


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return whether the head has a bias, in a GGUF file."""
    return {"lm_head_bias": "output.bias" in keys.tensors}


def gguf_rope(keys: GgufKeys) -> dict[str, object]:
    """Return the one magnitude that a GGUF file has, which llama.cpp makes of the lengths."""
    if ROPE_FACTORS not in keys.tensors:
        return {}
    return dict.fromkeys(MAGNITUDES, keys.positive("rope.scaling.attn_factor", 1.0))


@family(
    "PhimoeForCausalLM",
    "PhiMoEForCausalLM",  # as the published checkpoints say
    config_class=read_config_class("PhimoeForCausalLM"),
    keys=f"attention_bias lm_head_bias {KEYS} router_jitter_noise input_jitter_noise",
    derived=derived,
    tensors=TensorNames(NAMES),
    gguf=GgufForm(
        "phimoe",
        has_experts=True,
        flags={"attention_bias": "attn_q.bias"},
        numbers={"sliding_window": "attention.sliding_window"},
        config=gguf_config,
        rope=gguf_rope,
    ),
)
def phimoe(config: Reader) -> Axes:
    """Read the experts; the jitter of routers is how far from the best a score may be."""
    bias = config.flag("attention_bias", default=False)
    jitter = config.positive("router_jitter_noise", 0.01)
    routing = read_routing(config, Score.SPARSEMIXER, False, jitter)
    return Axes(
        norm=NormKind.LAYER,
        qkv_bias=bias,
        out_bias=bias,
        head_bias=config.flag("lm_head_bias", default=False),
        experts=read_experts(config, routing, "intermediate_size"),
    )
