"""K-EXAONE (LG AI Research, 2026): EXAONE 4's attention, norms before, experts as DeepSeek V3's."""

from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.experts import CORRECTION, listed_dense_layers
from slipstream.models.families import exaone4
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.gguf_latent import logistic_experts
from slipstream.models.latent import EXPERT_KEYS, derived_experts, sigmoid_experts
from slipstream.models.reader import Reader

NAMES = {
    "mlp.shared_expert": "mlp.shared_experts",
    f"mlp.gate.{CORRECTION}": f"mlp.{CORRECTION}",
}


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the window of a GGUF file; refuse experts of all rows of another size."""
    key = "expert_shared_feed_forward_length"
    size = keys.whole("expert_feed_forward_length") * keys.whole("expert_shared_count")
    if keys.whole(key, size) != size:
        raise keys.refusal(key, f"is not implemented; {size} is")
    return exaone4.gguf_config(keys)


@family(
    "ExaoneMoeForCausalLM",
    keys=f"{EXPERT_KEYS} mlp_layer_types sliding_window_pattern",
    still=exaone4.still,
    aliases="n_routed_experts=num_experts n_shared_experts=num_shared_experts",
    derived=derived_experts,
    tensors=TensorNames(NAMES, unused=("mtp.",)),
    gguf=GgufForm("exaone-moe", has_experts=True, experts=logistic_experts, config=gguf_config),
)
def exaone_moe(config: Reader) -> Axes:
    """Read the experts, and which layers have none: a list says, or the first."""
    experts, first = sigmoid_experts(config, normalises=True)
    dense = listed_dense_layers(config, first)
    return Axes(qk_norms=QkNorms.HEADS, experts=experts, dense_layers=dense)
