"""Granite MoE with windows (IBM, 2026): experts in the place of the MLPs of Granite's."""

from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.families.granite_swa import OWN, derived
from slipstream.models.families.granitemoe import EXPERT_KEYS, GATE_UP, ROUTED, TENSORS
from slipstream.models.families.granitemoeshared import SIZE, granitemoeshared
from slipstream.models.family import family
from slipstream.models.reader import Reader

_TOGETHER = tuple(f"{ROUTED}.experts.{{}}.{part}" for part in GATE_UP)


@family(
    "GraniteMoeSWAForCausalLM",
    keys=f"{EXPERT_KEYS} {OWN} {SIZE}",
    derived=derived,
    tensors=TensorNames(
        {**TENSORS.own, "mlp.gate": f"{ROUTED}.router"},
        stacked={
            **TENSORS.stacked,
            f"{ROUTED}.experts.gate_up_proj": _TOGETHER,
            f"{ROUTED}.experts.down_proj": (f"{ROUTED}.experts.{{}}.down_proj.weight",),
        },
    ),
)
def granitemoe_swa(config: Reader) -> Axes:
    """Read what Granite MoE has, with the shared expert or without."""
    return replace(granitemoeshared(config), sink_scores=True)
