"""Mistral (Jiang et al., 2023): Llama in which a query sees a window of the newest tokens."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader


def window(keys: GgufKeys) -> dict[str, object]:
    """Return the window of a GGUF file, which calls a model without one a Llama."""
    return {"sliding_window": keys.whole("attention.sliding_window")}


@family("MistralForCausalLM", gguf=GgufForm("llama", pairs_rows=True, config=window))
def mistral(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes()
