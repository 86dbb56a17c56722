"""CWM (Meta, 2025): Llama with windows in three of four layers."""

from collections.abc import Mapping

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.reader import Reader

_EVERY = 4  # so many layers, one has full attention: the first


def derived(config: Reader) -> Mapping[str, object]:
    """Return which layers have a window where config.json does not say."""
    if config.has("layer_types"):
        return {}
    kinds = ("full_attention", "sliding_attention")
    count = config.whole("num_hidden_layers")
    return {"layer_types": [kinds[i % _EVERY > 0] for i in range(count)]}


@family("CwmForCausalLM", keys="mlp_bias", derived=derived)
def cwm(config: Reader) -> Axes:
    """Read whether the matrices of the MLP have biases."""
    return Axes(mlp_bias=config.flag("mlp_bias", default=False))
