"""InternLM 3 (2025): Llama, with biases of q, k and v apart from those of all other matrices."""

from slipstream.models.axes import Axes
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.reader import Reader

CLASS = own_class(
    "internlm3",
    vocab_size=128512,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    hidden_act="silu",
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qkv_bias=False,
    bias=False,
    rope_theta=10000.0,
    rope_scaling=None,
    head_dim=None,
    eos_token_id=2,
)


@family(
    "InternLM3ForCausalLM",
    keys="qkv_bias bias",
    has_windows=False,
    config_class=CLASS,
)
def internlm3(config: Reader) -> Axes:
    """Read biases."""
    bias = config.flag("bias", default=False)
    qkv_bias = config.flag("qkv_bias", default=False)
    return Axes(qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bias)
