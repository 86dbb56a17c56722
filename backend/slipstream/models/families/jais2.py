"""Jais 2 (Inception, 2025): layer norms and a plain MLP of squared ReLU, biases throughout."""

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "Jais2ForCausalLM",
    keys="attention_bias mlp_bias",
    activations=ACTIVATIONS,
    has_windows=False,
    aliases="rms_norm_eps=layer_norm_eps",
    gguf=GgufForm(
        "jais2",
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        fixed={"hidden_act": "relu2"},
    ),
)
def jais2(config: Reader) -> Axes:
    """Read biases of attention and MLP."""
    bias = config.flag("attention_bias", default=True)
    return Axes(
        norm=NormKind.LAYER,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=True),
        gated=False,
    )
