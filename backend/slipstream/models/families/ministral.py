"""Ministral (Mistral AI, 2024): Mistral in which some layers have a window, by `layer_types`."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.reader import Reader


@family("MinistralForCausalLM")
def ministral(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes()
