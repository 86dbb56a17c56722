"""Qwen3 (Yang et al., 2025): Llama with each head's query and key normalised before rotation."""

from slipstream.models.axes import Axes, QkNorms
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader


def biases(keys: GgufKeys) -> dict[str, object]:
    """Return whether the tensors of a GGUF file have biases: its metadata does not say."""
    return {"attention_bias": "blk.0.attn_q.bias" in keys.tensors}


@family(
    "Qwen3ForCausalLM",
    keys="attention_bias use_sliding_window max_window_layers",
    gguf=GgufForm("qwen3", config=biases),
)
def qwen3(config: Reader) -> Axes:
    """Read whether all four attention matrices have biases."""
    bias = config.flag("attention_bias", default=False)
    return Axes(qk_norms=QkNorms.HEADS, qkv_bias=bias, out_bias=bias)
