"""Gemma 3, text (Gemma Team, 2025): most layers have a window, every sixth full attention.

Norms stand before and after both halves of a block; their stored weights are smaller by 1.
"""

from slipstream.models.axes import Activation, Axes, NormKind, TensorNames
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_ropes

NAMES = {
    "attention_out_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


@family(
    "Gemma3ForCausalLM",
    keys="attention_bias query_pre_attn_scalar rope_local_base_freq sliding_window_pattern",
    activation_key="hidden_activation",
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    read_ropes=read_ropes,
    tensors=TensorNames(NAMES),
)
def gemma3(config: Reader) -> Axes:
    """Read whether all attention matrices have biases; the embedding is scaled."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        norm=NormKind.ONE_PLUS_WEIGHT,
        norms_behind=True,
        qk_norms=True,
        qkv_bias=bias,
        out_bias=bias,
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        embedding_scale=float(config.whole("hidden_size") ** 0.5),
    )
