"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek V3's attention and experts; a list says which layers."""

from dataclasses import replace

from slipstream.models.axes import Axes
from slipstream.models.experts import listed_dense_layers
from slipstream.models.families.deepseek_v3 import deepseek_v3
from slipstream.models.family import family
from slipstream.models.latent import KEYS, derived, names
from slipstream.models.reader import Reader


@family(
    "Glm4MoeLiteForCausalLM",
    keys=f"{KEYS} rope_interleave mlp_layer_types",
    has_windows=False,
    derived=derived,
    tensors=names,
)
def glm4_moe_lite(config: Reader) -> Axes:
    """Read the sizes of latents, experts by logistic scores, and which layers have them."""
    dense = listed_dense_layers(config, frozenset({0}))
    return replace(deepseek_v3(config), dense_layers=dense)
