"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts in the place of most MLPs."""

from slipstream.models.axes import Axes, QkNorms
from slipstream.models.experts import KEYS, read_dense_layers, read_experts, read_routing
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "Qwen3MoeForCausalLM",
    keys=f"attention_bias {KEYS} moe_intermediate_size norm_topk_prob "
    "mlp_only_layers decoder_sparse_step use_sliding_window max_window_layers",
    has_windows=False,
    gguf=GgufForm(
        "qwen3moe",
        has_experts=True,
        flags={"attention_bias": "attn_q.bias"},
        numbers={"moe_intermediate_size": "expert_feed_forward_length"},
        fixed={"norm_topk_prob": True},
    ),
)
def qwen3_moe(config: Reader) -> Axes:
    """Read the experts, which layers have none, and whether attention has biases."""
    bias = config.flag("attention_bias", default=False)
    normalises = config.flag("norm_topk_prob", default=False)
    routing = read_routing(config, normalises=normalises)
    return Axes(
        qk_norms=QkNorms.HEADS,
        qkv_bias=bias,
        out_bias=bias,
        experts=read_experts(config, routing, "moe_intermediate_size"),
        dense_layers=read_dense_layers(config),
    )
