"""Granite MoE with an expert of all rows beside those that are chosen (IBM, 2025)."""

from dataclasses import replace

from slipstream.models.axes import Axes
from slipstream.models.experts import read_experts, read_routing
from slipstream.models.families.granite import granite
from slipstream.models.families.granitemoe import EXPERT_KEYS, TENSORS
from slipstream.models.family import family
from slipstream.models.reader import Reader

SIZE = "shared_intermediate_size"


@family(
    "GraniteMoeSharedForCausalLM",
    keys=f"{EXPERT_KEYS} {SIZE}",
    has_windows=False,
    tensors=TENSORS,
)
def granitemoeshared(config: Reader) -> Axes:
    """Read what Granite MoE has, and the size of the shared expert; 0: there is none."""
    shared = SIZE if config.get(SIZE) not in (None, 0) else ""
    experts = read_experts(config, read_routing(config), "intermediate_size", shared)
    return replace(granite(config), experts=experts)
