"""Qwen2 and 2.5 (Yang et al., 2024): Llama with biases on q, k and v alone."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "Qwen2ForCausalLM",
    keys="use_sliding_window max_window_layers",
    gguf=GgufForm("qwen2"),
)
def qwen2(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes(qkv_bias=True)
