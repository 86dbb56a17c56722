"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek V3's attention and experts; a list says which layers."""

from dataclasses import replace

from slipstream.models.axes import Axes
from slipstream.models.families.deepseek_v3 import deepseek_v3
from slipstream.models.family import family
from slipstream.models.latent import KEYS, derived, names
from slipstream.models.reader import Reader

KINDS = ("dense", "sparse")


def dense_layers(config: Reader) -> frozenset[int]:
    """Return the layers without experts: those of `mlp_layer_types`, else the first."""
    count, kinds = config.whole("num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        return frozenset({0})
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= set(KINDS):
        raise config.refusal(
            "mlp_layer_types", f"is not a list of {count} of {' and '.join(KINDS)}"
        )
    return frozenset(i for i, kind in enumerate(kinds) if kind == KINDS[0])


@family(
    "Glm4MoeLiteForCausalLM",
    keys=f"{KEYS} rope_interleave mlp_layer_types",
    has_windows=False,
    derived=derived,
    tensors=names,
)
def glm4_moe_lite(config: Reader) -> Axes:
    """Read the sizes of latents, experts by logistic scores, and which layers have them."""
    return replace(deepseek_v3(config), dense_layers=dense_layers(config))
