"""Mistral (Jiang et al., 2023): Llama in which a query sees a window of the newest tokens."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.reader import Reader


@family("MistralForCausalLM")
def mistral(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes()
