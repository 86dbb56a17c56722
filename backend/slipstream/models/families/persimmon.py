"""Persimmon (Elsen et al., 2023): layer norms of heads, half of each rotates, squared ReLU."""

from slipstream.models.axes import (
    ACTIVATIONS,
    Axes,
    NormKind,
    QkNorms,
    QkvOrder,
    TensorNames,
    joined,
)
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = {
    "model.norm": "model.final_layernorm",
    **joined("self_attn.query_key_value"),
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


@family(
    "PersimmonForCausalLM",
    keys="qk_layernorm",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=read_partial_rope,
    aliases="rms_norm_eps=layer_norm_eps",
    tensors=TensorNames(NAMES, qkv=QkvOrder.HEADS),
)
def persimmon(config: Reader) -> Axes:
    """Read whether queries and keys are normalised."""
    has_norms = config.flag("qk_layernorm", default=True)
    return Axes(
        norm=NormKind.LAYER,
        qk_norms=QkNorms.LAYER if has_norms else QkNorms.NONE,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
    )
