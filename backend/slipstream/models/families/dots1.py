"""dots.llm1 (rednote, 2025): Qwen3's attention, DeepSeek V3's experts."""

from slipstream.models.axes import Axes, QkNorms
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.gguf_latent import logistic_experts
from slipstream.models.latent import EXPERT_KEYS, derived_experts, names, sigmoid_experts
from slipstream.models.reader import Reader


@family(
    "Dots1ForCausalLM",
    keys=f"{EXPERT_KEYS} attention_bias max_window_layers use_sliding_window",
    derived=derived_experts,
    tensors=names,
    gguf=GgufForm(
        "dots1",
        has_experts=True,
        experts=logistic_experts,
        flags={"attention_bias": "attn_q.bias"},
    ),
    said={"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
)
def dots1(config: Reader) -> Axes:
    """Read the experts, and whether all attention matrices have biases."""
    bias = config.flag("attention_bias", default=False)
    experts, dense = sigmoid_experts(config, normalises=False)
    return Axes(
        qk_norms=QkNorms.HEADS,
        qkv_bias=bias,
        out_bias=bias,
        experts=experts,
        dense_layers=dense,
    )
