"""Llama (Touvron et al., 2023): grouped-query attention, gated MLP, RMS norms before both."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.reader import Reader


@family(
    "LlamaForCausalLM",
    keys="attention_bias mlp_bias use_sliding_window max_window_layers",
    has_windows=False,
)
def llama(config: Reader) -> Axes:
    """Read whether all attention matrices have biases, and all matrices of the MLP."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return Axes(qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
