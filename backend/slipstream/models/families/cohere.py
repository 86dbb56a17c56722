"""Cohere's Command R (2024): attention and MLP of one layer norm, without bias, of the same sum."""

from slipstream.models.axes import Axes, NormKind, QkNorms, Residuals, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


def axes(config: Reader, qk_norms: QkNorms = QkNorms.NONE) -> Axes:
    """Read what both versions have: biases of attention, and the factor of logits."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        norm=NormKind.LAYER_WITHOUT_BIAS,
        residuals=Residuals.ONE_NORM,
        qk_norms=qk_norms,
        interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        logit_scale=config.positive("logit_scale", 0.0625),
    )


@family(
    "CohereForCausalLM",
    keys="attention_bias logit_scale use_qk_norm",
    has_windows=False,
    aliases="rms_norm_eps=layer_norm_eps",
    tensors=TensorNames(norms_each_head=True),
    gguf=GgufForm(
        "command-r",
        norms_each_head=True,
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        numbers={"logit_scale": "logit_scale"},
    ),
)
def cohere(config: Reader) -> Axes:
    """Read also whether each head of q and k has a layer norm, with weights of its own."""
    normalises = config.flag("use_qk_norm", default=False)
    return axes(config, QkNorms.LAYER_HEADS if normalises else QkNorms.NONE)
