"""DeepSeek V3, R1 (DeepSeek-AI, 2024): latent attention, experts in groups by logistic scores."""

from dataclasses import replace

from slipstream.kernels.experts.spec import MAX_EXPERTS, MAX_TOP_K, Routing, Score
from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.latent import KEYS, derived, latent_axes, names, with_groups
from slipstream.models.reader import Reader


@family(
    "DeepseekV3ForCausalLM",
    keys=f"{KEYS} rope_interleave",
    has_windows=False,
    derived=derived,
    tensors=names,
)
def deepseek_v3(config: Reader) -> Axes:
    """Read the sizes of latents, and how experts are chosen: by scores with a correction."""
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    routing = Routing(
        config.whole("n_routed_experts", most=MAX_EXPERTS),
        config.whole("num_experts_per_tok", most=MAX_TOP_K),
        Score.SIGMOID,
        normalises=config.flag("norm_topk_prob", default=True),
        factor=config.positive("routed_scaling_factor"),
    )
    interleaved = config.flag("rope_interleave", default=True)
    axes = latent_axes(config, with_groups(config, routing), interleaved)
    assert axes.experts is not None, "latent_axes made them"
    return replace(axes, experts=replace(axes.experts, corrected=True))
