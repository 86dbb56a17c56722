"""Phi-3.5-MoE (Abdin et al., 2024): layer norms, and two experts by a sparse mixer."""

from slipstream.kernels.experts.spec import Score
from slipstream.layers.dims import RopeConfig
from slipstream.models.axes import Axes, NormKind, TensorNames
from slipstream.models.experts import KEYS, read_experts, read_routing
from slipstream.models.families.mixtral import NAMES
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_rope


def read_ropes(config: Reader, max_positions: int, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Read `read_rope`; refuse factors by length: those of this class have magnitudes, too."""
    ropes = read_rope(config, max_positions, head_size)
    if ropes[0].short_factors:
        key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
        raise config.refusal(key, "has factors by length (longrope): not implemented here")
    return ropes


@family(
    "PhimoeForCausalLM",
    keys=f"attention_bias lm_head_bias {KEYS} router_jitter_noise input_jitter_noise",
    read_ropes=read_ropes,
    tensors=TensorNames(NAMES),
)
def phimoe(config: Reader) -> Axes:
    """Read the experts; the jitter of routers is how far from the best a score may be."""
    bias = config.flag("attention_bias", default=False)
    jitter = config.positive("router_jitter_noise", 0.01)
    routing = read_routing(config, Score.SPARSEMIXER, False, jitter)
    return Axes(
        norm=NormKind.LAYER,
        qkv_bias=bias,
        out_bias=bias,
        head_bias=config.flag("lm_head_bias", default=False),
        experts=read_experts(config, routing, "intermediate_size"),
    )
