"""Llama (Touvron et al., 2023): grouped-query attention, gated MLP, RMS norms before both."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader


def biases(keys: GgufKeys) -> dict[str, object]:
    """Return which biases the tensors of a GGUF file have: its metadata does not say."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in keys.tensors,
    }


@family(
    "LlamaForCausalLM",
    keys="attention_bias mlp_bias use_sliding_window max_window_layers",
    has_windows=False,
    gguf=GgufForm("llama", pairs_rows=True, config=biases),
)
def llama(config: Reader) -> Axes:
    """Read whether all attention matrices have biases, and all matrices of the MLP."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return Axes(qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
