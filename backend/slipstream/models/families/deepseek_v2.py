"""DeepSeek V2 (DeepSeek-AI, 2024): latent attention, experts by softmax, some in groups."""

from slipstream.kernels.experts.spec import MAX_EXPERTS, MAX_TOP_K, Routing
from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_latent import SOFTMAX, latent_form
from slipstream.models.latent import KEYS, derived, latent_axes, names, with_groups
from slipstream.models.reader import Reader


@family(
    "DeepseekV2ForCausalLM",
    keys=KEYS,
    has_windows=False,
    derived=derived,
    tensors=names,
    gguf=latent_form(SOFTMAX),
    said={"moe_intermediate_size": 1408},  # of V2 Lite; transformers' class has 1407
)
def deepseek_v2(config: Reader) -> Axes:
    """Read the sizes of latents, and how experts are chosen; weights are not normalised."""
    config.refuse_unless("norm_topk_prob", value=False)
    config.refuse_unless("scoring_func", "softmax")
    routing = Routing(
        config.whole("n_routed_experts", most=MAX_EXPERTS),
        config.whole("num_experts_per_tok", 6, MAX_TOP_K),  # as all that are published
        factor=config.positive("routed_scaling_factor"),
    )
    methods = ("greedy", "group_limited_greedy")
    if config.get("topk_method") not in methods:
        raise config.refusal("topk_method", f"is not implemented; {' and '.join(methods)} are")
    if config.get("topk_method") == methods[1]:
        routing = with_groups(config, routing)
    return latent_axes(config, routing, interleaved=True)
