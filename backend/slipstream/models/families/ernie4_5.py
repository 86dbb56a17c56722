"""ERNIE 4.5 (Baidu, 2025), dense: Llama whose pairs that rotate lie side by side."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "Ernie4_5ForCausalLM",
    keys="use_bias",
    has_windows=False,
    gguf=GgufForm("ernie4_5", flags={"use_bias": "attn_q.bias"}),
)
def ernie4_5(config: Reader) -> Axes:
    """Read whether all matrices have biases."""
    bias = config.flag("use_bias", default=False)
    return Axes(interleaved=True, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
