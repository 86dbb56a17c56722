"""InternLM 2 and 2.5 (Cai et al., 2024): Llama with q, k and v in one matrix, group by group."""

from slipstream.models.axes import Axes, QkvOrder, TensorNames, joined
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader

CLASS = own_class(
    "internlm2",
    vocab_size=103168,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    hidden_act="silu",
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    bias=True,
    rope_theta=10000,
    rope_scaling=None,
    eos_token_id=2,
)
NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **joined("attention.wqkv"),
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


@family(
    "InternLM2ForCausalLM",
    keys="bias",
    has_windows=False,
    tensors=TensorNames(NAMES, qkv=QkvOrder.GROUPS),
    config_class=CLASS,
    gguf=GgufForm("internlm2", pairs_rows=True, flags={"bias": "attn_q.bias"}),
)
def internlm2(config: Reader) -> Axes:
    """Read whether all attention matrices have biases."""
    bias = config.flag("bias", default=True)
    return Axes(qkv_bias=bias, out_bias=bias)
