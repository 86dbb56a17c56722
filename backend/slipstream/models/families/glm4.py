"""GLM-4-0414 (Z.ai, 2025): GLM-4 with norms behind attention and MLP, too."""

from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.families.glm import NAMES, glm
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

OWN = {
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


@family(
    "Glm4ForCausalLM",
    keys="attention_bias",
    has_windows=False,
    read_ropes=read_partial_rope,
    tensors=TensorNames(NAMES | OWN, joins_gate_up=True),
    gguf=GgufForm(
        "glm4",
        joins_gate_up=True,
        is_partial=True,
        flags={"attention_bias": "attn_q.bias"},
    ),
)
def glm4(config: Reader) -> Axes:
    """Read whether q, k and v have biases."""
    return replace(glm(config), norms_behind=True)
