"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with q, k, v in one matrix, gate and up in another.

Long contexts stretch each pair of a head by a factor of its own (longrope).
"""

from collections.abc import Mapping

from slipstream.models.axes import Axes, QkvOrder, TensorNames, joined
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = joined("self_attn.qkv_proj") | joined("mlp.gate_up_proj", "mlp")


_OLD = ("su", "yarn")  # what the first files call longrope


def derived(config: Reader) -> Mapping[str, object]:
    """Return the scaling of positions by the name that it has today."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") not in _OLD:
        return {}
    return {"rope_scaling": scaling | {"type": "longrope"}}


@family(
    "Phi3ForCausalLM",
    read_ropes=read_partial_rope,
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.BLOCKS, joins_gate_up=True),
    gguf=GgufForm(
        "phi3",
        qkv=QkvOrder.BLOCKS,
        joins_gate_up=True,
        is_partial=True,
        numbers={"sliding_window": "attention.sliding_window"},
    ),
)
def phi3(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes()
