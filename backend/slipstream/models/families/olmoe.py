"""OLMoE (Muennighoff et al., 2024): experts, and queries and keys normalised over all heads."""

from slipstream.models.axes import Axes, QkNorms
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "OlmoeForCausalLM",
    keys=f"attention_bias {KEYS} norm_topk_prob",
    has_windows=False,
    gguf=GgufForm("olmoe", has_experts=True),
)
def olmoe(config: Reader) -> Axes:
    """Read the experts, and whether attention has biases."""
    bias = config.flag("attention_bias", default=False)
    normalises = config.flag("norm_topk_prob", default=False)
    routing = read_routing(config, normalises=normalises)
    return Axes(
        qk_norms=QkNorms.WHOLE,
        qkv_bias=bias,
        out_bias=bias,
        experts=read_experts(config, routing, "intermediate_size"),
    )
