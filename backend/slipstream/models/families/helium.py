"""Helium (Kyutai, 2025): Llama whose pairs that rotate lie side by side."""

from collections.abc import Mapping

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.reader import Reader


def derived(config: Reader) -> Mapping[str, object]:
    """Return nothing; refuse heads that do not share out the hidden size."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if config.has("head_dim") and config.whole("head_dim") * heads != hidden:
        raise config.refusal("head_dim", f"of {heads} heads is not hidden_size = {hidden}")
    return {}


@family("HeliumForCausalLM", keys="attention_bias mlp_bias", has_windows=False, derived=derived)
def helium(config: Reader) -> Axes:
    """Read biases of q, k and v, and of the MLP."""
    return Axes(
        interleaved=True,
        qkv_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
