"""GLM-4.5 (Z.ai, 2025): experts by logistic scores, as DeepSeek V3 has; half a head rotates."""

from slipstream.models.axes import Axes, QkNorms
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.gguf_latent import logistic_experts
from slipstream.models.latent import EXPERT_KEYS, derived_experts, names, sigmoid_experts
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope


@family(
    "Glm4MoeForCausalLM",
    keys=f"{EXPERT_KEYS} attention_bias use_qk_norm",
    has_windows=False,
    read_ropes=read_partial_rope,
    derived=derived_experts,
    tensors=names,
    said={"head_dim": 128},
    gguf=GgufForm(
        "glm4moe",
        has_experts=True,
        experts=logistic_experts,
        names={"post_attention_norm": "post_attention_layernorm"},
        is_partial=True,
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
)
def glm4_moe(config: Reader) -> Axes:
    """Read the experts, biases of q, k and v, and whether each head is normalised."""
    has_norms = config.flag("use_qk_norm", default=False)
    experts, dense = sigmoid_experts(config, normalises=True)
    return Axes(
        qk_norms=QkNorms.HEADS if has_norms else QkNorms.NONE,
        qkv_bias=config.flag("attention_bias", default=False),
        experts=experts,
        dense_layers=dense,
    )
