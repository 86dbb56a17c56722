"""Granite with windows (IBM, 2026): sinks in the softmax, each layer rotates by its own theta."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import Axes
from slipstream.models.families.granite import KEYS, granite
from slipstream.models.family import family
from slipstream.models.reader import Reader

OWN = "layer_rope_theta"
_EVERY = 4  # so many layers, the first has full attention


def derived(config: Reader) -> Mapping[str, object]:
    """Return which layers have a window where config.json does not say."""
    if config.has("layer_types"):
        return {}
    kinds = ["full_attention", *["sliding_attention"] * (_EVERY - 1)]
    count = config.whole("num_hidden_layers")
    return {"layer_types": [kinds[i % _EVERY] for i in range(count)]}


@family("GraniteSWAForCausalLM", keys=f"{KEYS} {OWN} mlp_bias", derived=derived)
def granite_swa(config: Reader) -> Axes:
    """Read biases of attention and MLP, and the factors."""
    return replace(granite(config), sink_scores=True)
