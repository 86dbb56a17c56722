"""GLM-4 (Team GLM, 2024), as transformers has it: half of each head rotates, interleaved."""

from slipstream.models.axes import Axes, TensorNames, joined
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = joined("mlp.gate_up_proj", "mlp")


@family(
    "GlmForCausalLM",
    keys="attention_bias",
    has_windows=False,
    read_ropes=read_partial_rope,
    tensors=TensorNames(NAMES, joins_gate_up=True),
)
def glm(config: Reader) -> Axes:
    """Read whether q, k and v have biases."""
    return Axes(interleaved=True, qkv_bias=config.flag("attention_bias", default=True))
