"""OLMo 2 (OLMo Team, 2024): norms stand behind attention and MLP alone.

All queries of a token are one row of a norm, all its keys another.
"""

from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader

NAMES = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


@family(
    "Olmo2ForCausalLM",
    keys="attention_bias",
    has_windows=False,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("olmo2", flags={"attention_bias": "attn_q.bias"}),
)
def olmo2(config: Reader) -> Axes:
    """Read whether all attention matrices have biases."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        norms_before=False,
        norms_behind=True,
        qk_norms=QkNorms.WHOLE,
        qkv_bias=bias,
        out_bias=bias,
    )
