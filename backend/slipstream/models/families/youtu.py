"""Youtu-LLM (Tencent, 2025): DeepSeek V3's attention, an MLP in every layer."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.latent import LATENT_KEYS, derived, latent_axes
from slipstream.models.reader import Reader


@family(
    "YoutuForCausalLM",
    keys=f"{LATENT_KEYS} rope_interleave embedding_initializer_range",
    has_windows=False,
    derived=derived,
)
def youtu(config: Reader) -> Axes:
    """Read the sizes of latents."""
    return latent_axes(config, None, config.flag("rope_interleave", default=True))
