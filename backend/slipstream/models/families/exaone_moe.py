"""K-EXAONE (LG AI Research, 2026): EXAONE 4's attention, norms before, experts as DeepSeek V3's."""

from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.experts import listed_dense_layers
from slipstream.models.families.exaone4 import still
from slipstream.models.family import family
from slipstream.models.latent import EXPERT_KEYS, derived_experts, sigmoid_experts
from slipstream.models.reader import Reader

CORRECTION = "e_score_correction_bias"
NAMES = {
    "mlp.shared_expert": "mlp.shared_experts",
    f"mlp.gate.{CORRECTION}": f"mlp.{CORRECTION}",
}


@family(
    "ExaoneMoeForCausalLM",
    keys=f"{EXPERT_KEYS} mlp_layer_types sliding_window_pattern",
    still=still,
    aliases="n_routed_experts=num_experts n_shared_experts=num_shared_experts",
    derived=derived_experts,
    tensors=TensorNames(NAMES, unused=("mtp.",)),
)
def exaone_moe(config: Reader) -> Axes:
    """Read the experts, and which layers have none: a list says, or the first."""
    experts, first = sigmoid_experts(config, normalises=True)
    dense = listed_dense_layers(config, first)
    return Axes(qk_norms=QkNorms.HEADS, experts=experts, dense_layers=dense)
