"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, sinks in the softmax."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.kernels.experts.spec import Gate
from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.family import family
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


@family(
    "GptOssForCausalLM",
    keys=f"attention_bias {KEYS}",
    derived=derived,
    tensors=TensorNames({"mlp.gate": "mlp.router"}),
)
def gpt_oss(config: Reader) -> Axes:
    """Read the experts, which are stored together, and whether attention has biases."""
    bias = config.flag("attention_bias", default=True)
    experts = read_experts(config, read_routing(config), "intermediate_size")
    return Axes(
        qkv_bias=bias,
        out_bias=bias,
        sink_scores=True,
        experts=replace(experts, gate=Gate.CLAMPED, bias=True, is_fused=True),
    )
