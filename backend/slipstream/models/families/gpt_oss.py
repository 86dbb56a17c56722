"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, sinks in the softmax."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.kernels.experts.spec import Gate
from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader

# What transformers' class does when a file is silent: it has no field that says so.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return what a file that is silent has: every other layer a window, a stretched rotation."""
    found: dict[str, object] = {}
    if not config.has("layer_types"):
        found["sliding_window_pattern"] = 2
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        found["rope_parameters"] = _ROPE
    return found


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the stretched rotation of a GGUF file, whose ramp has no whole ends."""
    if not keys.has("rope.scaling.factor"):
        return {}
    original = keys.whole("rope.scaling.original_context_length")
    own = {"factor": keys.positive("rope.scaling.factor")}
    return {"rope_scaling": _ROPE | own | {"original_max_position_embeddings": original}}


@family(
    "GptOssForCausalLM",
    keys=f"attention_bias {KEYS}",
    derived=derived,
    tensors=TensorNames({"mlp.gate": "mlp.router"}),
    gguf=GgufForm(
        "gpt-oss",
        has_experts=True,
        names={"post_attention_norm": "post_attention_layernorm"},
        flags={"attention_bias": "attn_q.bias"},
        numbers={
            "sliding_window": "attention.sliding_window",
            "intermediate_size": "expert_feed_forward_length",
        },
        config=gguf_config,
    ),
)
def gpt_oss(config: Reader) -> Axes:
    """Read the experts, which are stored together, and whether attention has biases."""
    bias = config.flag("attention_bias", default=True)
    experts = read_experts(config, read_routing(config), "intermediate_size")
    return Axes(
        qkv_bias=bias,
        out_bias=bias,
        sink_scores=True,
        experts=replace(experts, gate=Gate.CLAMPED, bias=True, takes_turns=True, is_fused=True),
    )
