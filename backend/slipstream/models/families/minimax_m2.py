"""MiniMax M2 (2025): norms of all heads together, experts by logistic scores."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.kernels.experts.spec import Score
from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.experts import CORRECTION, KEYS, read_experts, read_routing
from slipstream.models.families import mixtral
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.gguf_latent import SIGMOID
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

NAMES = {**mixtral.NAMES, f"mlp.gate.{CORRECTION}": f"block_sparse_moe.{CORRECTION}"}


def derived(config: Reader) -> Mapping[str, object]:
    """Return which share of a head rotates, of which the published files give the numbers."""
    if not config.has("rotary_dim") or config.has("partial_rotary_factor"):
        return {}
    size = config.whole("head_dim")
    return {"partial_rotary_factor": config.whole("rotary_dim", most=size) / size}


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the size of experts; their scores are logistic, and weights add up to one."""
    if keys.get("expert_gating_func") not in (None, 0, SIGMOID):
        raise keys.refusal("expert_gating_func", f"is not implemented; {SIGMOID} is")
    return {"intermediate_size": keys.whole("expert_feed_forward_length")}


@family(
    "MiniMaxM2ForCausalLM",
    keys=f"{KEYS} rotary_dim router_jitter_noise",
    has_windows=False,
    read_ropes=read_partial_rope,
    derived=derived,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("minimax-m2", has_experts=True, is_partial=True, config=gguf_config),
)
def minimax_m2(config: Reader) -> Axes:
    """Read the experts, which are chosen by scores with a correction; jitter is of training."""
    routing = read_routing(config, Score.SIGMOID)
    experts = read_experts(config, routing, "intermediate_size")
    return Axes(qk_norms=QkNorms.WHOLE, experts=replace(experts, corrected=True))
