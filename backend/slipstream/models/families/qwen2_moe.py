"""Qwen1.5-MoE and Qwen2-MoE (Yang et al., 2024): Qwen2 with experts, one of them of all rows."""

from slipstream.models.axes import Axes
from slipstream.models.experts import KEYS, read_dense_layers, read_experts, read_routing
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "Qwen2MoeForCausalLM",
    keys=f"qkv_bias {KEYS} moe_intermediate_size norm_topk_prob "
    "shared_expert_intermediate_size mlp_only_layers decoder_sparse_step use_sliding_window "
    "max_window_layers",
    has_windows=False,
    gguf=GgufForm(
        "qwen2moe",
        has_experts=True,
        flags={"qkv_bias": "attn_q.bias"},
        numbers={
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
)
def qwen2_moe(config: Reader) -> Axes:
    """Read the experts, and which layers have none."""
    normalises = config.flag("norm_topk_prob", default=False)
    return Axes(
        qkv_bias=config.flag("qkv_bias", default=True),
        experts=read_experts(
            config,
            read_routing(config, normalises=normalises),
            "moe_intermediate_size",
            shared="shared_expert_intermediate_size",
            shared_gated=True,
        ),
        dense_layers=read_dense_layers(config),
    )
