"""AFM (Arcee, 2025): Llama with a plain MLP of squared ReLU."""

from slipstream.models.axes import ACTIVATIONS, Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "ArceeForCausalLM",
    keys="attention_bias mlp_bias",
    activations=ACTIVATIONS,
    has_windows=False,
    gguf=GgufForm(
        "arcee",
        pairs_rows=True,
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    ),
)
def arcee(config: Reader) -> Axes:
    """Read biases."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return Axes(qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, gated=False)
