"""Granite MoE (IBM, 2024), PowerMoE: Granite with experts, which lie behind one another."""

from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import read_experts, read_routing
from slipstream.models.families.granite import KEYS, granite
from slipstream.models.family import family
from slipstream.models.reader import Reader

ROUTED, SHARED = "block_sparse_moe", "shared_mlp"
GATE_UP = ("gate_proj.weight", "up_proj.weight")
TENSORS = TensorNames(
    {
        "mlp.gate": f"{ROUTED}.router.layer",
        "mlp.experts": f"{ROUTED}.experts",
        "mlp.shared_expert": SHARED,
    },
    stacked={
        f"{ROUTED}.input_linear.weight": tuple(f"{ROUTED}.experts.{{}}.{x}" for x in GATE_UP),
        f"{ROUTED}.output_linear.weight": (f"{ROUTED}.experts.{{}}.down_proj.weight",),
        f"{SHARED}.input_linear.weight": tuple(f"{SHARED}.{x}" for x in GATE_UP),
        f"{SHARED}.output_linear.weight": (f"{SHARED}.down_proj.weight",),
    },
)
EXPERT_KEYS = f"{KEYS} num_local_experts num_experts_per_tok"


@family("GraniteMoeForCausalLM", keys=EXPERT_KEYS, has_windows=False, tensors=TENSORS)
def granitemoe(config: Reader) -> Axes:
    """Read the factors of Granite, and the experts, whose weights are a softmax of the chosen."""
    experts = read_experts(config, read_routing(config), "intermediate_size")
    return replace(granite(config), experts=experts)
