"""DeepSeek V3, R1 (DeepSeek-AI, 2024): latent attention, experts in groups by logistic scores."""

from dataclasses import replace

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_latent import SIGMOID, latent_form
from slipstream.models.latent import KEYS, derived, latent_axes, names, sigmoid_routing
from slipstream.models.reader import Reader


@family(
    "DeepseekV3ForCausalLM",
    keys=f"{KEYS} rope_interleave",
    has_windows=False,
    derived=derived,
    tensors=names,
    gguf=latent_form(SIGMOID),
)
def deepseek_v3(config: Reader) -> Axes:
    """Read the sizes of latents, and how experts are chosen: by scores with a correction."""
    interleaved = config.flag("rope_interleave", default=True)
    axes = latent_axes(config, sigmoid_routing(config, normalises=True), interleaved)
    assert axes.experts is not None, "latent_axes made them"
    return replace(axes, experts=replace(axes.experts, corrected=True))
