"""Phi-1, 1.5 and 2 (Li et al., 2023): parallel residuals of one norm, a part of heads rotates."""

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind, QkNorms, Residuals, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = {
    "model.norm": "model.final_layernorm",
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


@family(
    "PhiForCausalLM",
    keys="qk_layernorm",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=read_partial_rope,
    aliases="rms_norm_eps=layer_norm_eps",
    tensors=TensorNames(NAMES),
    gguf=GgufForm("phi2", is_partial=True),
)
def phi(config: Reader) -> Axes:
    """Read whether queries and keys are normalised."""
    has_norms = config.flag("qk_layernorm", default=False)
    return Axes(
        norm=NormKind.LAYER,
        residuals=Residuals.ONE_NORM,
        qk_norms=QkNorms.LAYER if has_norms else QkNorms.NONE,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        head_bias=True,
    )
