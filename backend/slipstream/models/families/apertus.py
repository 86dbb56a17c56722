"""Apertus (Swiss AI Initiative, 2025): q and k normalised, xIELU with learned numbers, no gate."""

from collections.abc import Mapping

from slipstream.models.axes import ACTIVATIONS, Activation, Axes, QkNorms, TensorNames
from slipstream.models.family import family
from slipstream.models.reader import Reader

NAMES = {
    "input_layernorm": "attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return the rotation of a config.json that has none, as transformers' class does."""
    has_none = not config.has("rope_parameters") and not config.has("rope_scaling")
    return {"rope_parameters": _ROPE} if has_none else {}


@family(
    "ApertusForCausalLM",
    keys="attention_bias",
    activations={**ACTIVATIONS, "xielu": Activation.XIELU},
    has_windows=False,
    derived=derived,
    tensors=TensorNames(NAMES),
)
def apertus(config: Reader) -> Axes:
    """Read whether attention has biases."""
    bias = config.flag("attention_bias", default=False)
    return Axes(qk_norms=QkNorms.HEADS, qkv_bias=bias, out_bias=bias, gated=False)
