"""Mixtral (Jiang et al., 2024): Mistral with eight experts in the place of each MLP."""

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader

NAMES = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts": "block_sparse_moe.experts",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


@family(
    "MixtralForCausalLM",
    keys=f"{KEYS} router_jitter_noise",
    tensors=TensorNames(NAMES),
    gguf=GgufForm(
        "llama",
        pairs_rows=True,
        has_experts=True,
        numbers={"sliding_window": "attention.sliding_window"},
    ),
)
def mixtral(config: Reader) -> Axes:
    """Read the experts, whose weights are a softmax of the chosen; jitter is of training."""
    routing = read_routing(config)
    return Axes(experts=read_experts(config, routing, "intermediate_size"))
