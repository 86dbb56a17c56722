"""Nemotron 3 and 4, Minitron (NVIDIA, 2024): layer norms of 1 + weight, squared ReLU, no gate."""

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope


@family(
    "NemotronForCausalLM",
    keys="attention_bias mlp_bias",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=read_partial_rope,
    aliases="rms_norm_eps=norm_eps",
    gguf=GgufForm(
        "nemotron",
        norms_added=1.0,
        is_partial=True,
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        fixed={"hidden_act": "relu2"},
    ),
)
def nemotron(config: Reader) -> Axes:
    """Read biases of attention and MLP."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        norm=NormKind.LAYER_ONE_PLUS,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        gated=False,
    )
