"""Qwen3 (Yang et al., 2025): Llama with each head's query and key normalised before rotation."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.reader import Reader


@family("Qwen3ForCausalLM", keys="attention_bias use_sliding_window max_window_layers")
def qwen3(config: Reader) -> Axes:
    """Read whether all four attention matrices have biases."""
    bias = config.flag("attention_bias", default=False)
    return Axes(qk_norms=True, qkv_bias=bias, out_bias=bias)
