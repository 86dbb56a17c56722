"""StarCoder 2 (Lozhkov et al., 2024): layer norms, a plain MLP, biases, grouped queries."""

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "Starcoder2ForCausalLM",
    keys="use_bias residual_dropout embedding_dropout",
    activations=ACTIVATIONS,
    aliases="rms_norm_eps=norm_epsilon",
    tensors=TensorNames({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    gguf=GgufForm(
        "starcoder2",
        flags={"use_bias": "attn_q.bias"},
        numbers={"sliding_window": "attention.sliding_window"},
    ),
)
def starcoder2(config: Reader) -> Axes:
    """Read whether all matrices have biases."""
    bias = config.flag("use_bias", default=True)
    return Axes(norm=NormKind.LAYER, qkv_bias=bias, out_bias=bias, mlp_bias=bias, gated=False)
