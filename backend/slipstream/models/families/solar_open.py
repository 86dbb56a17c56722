"""Solar Open (Upstage, 2026): GLM-4.5's experts in all layers, Llama's attention."""

from collections.abc import Mapping

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.latent import EXPERT_KEYS, derived_experts, names, sigmoid_experts
from slipstream.models.reader import Reader, words

KEYS = " ".join(sorted(words(EXPERT_KEYS) - {"first_k_dense_replace"}))  # which changes nothing


def derived(config: Reader) -> Mapping[str, object]:
    """Return a size of MLPs, of which no layer has one."""
    return {**derived_experts(config), "intermediate_size": 4 * config.whole("hidden_size")}


@family(
    "SolarOpenForCausalLM",
    keys=f"{KEYS} attention_bias",
    has_windows=False,
    derived=derived,
    tensors=names,
)
def solar_open(config: Reader) -> Axes:
    """Read the experts, and biases of q, k and v."""
    experts, _ = sigmoid_experts(config, normalises=True)
    return Axes(qkv_bias=config.flag("attention_bias", default=False), experts=experts)
