"""ChatGLM 2 to 4 (Team GLM, 2024) by their own code: half of each head rotates, interleaved."""

from collections.abc import Mapping

from slipstream.models.axes import Activation, Axes, QkvOrder, TensorNames, joined
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_partial_rope

CLASS = own_class(
    "chatglm", num_layers=28, padded_vocab_size=65024, vocab_size=None, hidden_size=4096,
    ffn_hidden_size=13696, kv_channels=128, num_attention_heads=32, seq_length=2048,
    layernorm_epsilon=1e-5, rmsnorm=True, apply_residual_connection_post_layernorm=False,
    post_layer_norm=True, add_bias_linear=False, add_qkv_bias=False, multi_query_attention=False,
    multi_query_group_num=1, fp32_residual_connection=False, quantization_bit=0,
    pre_seq_len=None, original_rope=True, rope_ratio=1,
    tie_word_embeddings=False, position_encoding_2d=False, eos_token_id=2,
)  # fmt: skip
ENCODER = "transformer.encoder"
NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": f"{ENCODER}.layers",
    "model.norm": f"{ENCODER}.final_layernorm",
    "lm_head": "transformer.output_layer",
    **joined("self_attention.query_key_value"),
    "self_attn.o_proj": "self_attention.dense",
    **joined("mlp.dense_h_to_4h", "mlp"),
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
ALIASES = "num_hidden_layers=num_layers vocab_size=padded_vocab_size head_dim=kv_channels "
ALIASES += "intermediate_size=ffn_hidden_size max_position_embeddings=seq_length "
ALIASES += "rms_norm_eps=layernorm_epsilon"


def derived(config: Reader) -> Mapping[str, object]:
    """Return what its keys say of rotation, groups and the activation."""
    for key in ("rmsnorm", "post_layer_norm", "original_rope"):
        config.refuse_unless(key, value=True)
    groups = config.whole("multi_query_group_num") if config.get("multi_query_attention") else None
    return {
        "num_key_value_heads": groups,
        "rope_theta": 10000.0 * config.positive("rope_ratio", 1.0),
        "partial_rotary_factor": 0.5,
        "activation": "swiglu",
    }


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return groups, and the ratio of theta; refuse rotation of another share than a half."""
    size = keys.whole("attention.key_length", keys.whole("embedding_length") // keys.num_heads)
    if keys.whole("rope.dimension_count", size // 2) != size // 2:
        raise keys.refusal("rope.dimension_count", f"is not implemented; {size // 2} is")
    return {
        "multi_query_attention": True,
        "multi_query_group_num": keys.num_kv_heads,
        "rope_ratio": keys.positive("rope.freq_base", 10_000.0) / 10_000.0,
    }


def generation(config: Reader) -> str | None:
    """Return the architecture of the first generation, whose files have the same names."""
    return "ChatGLM1Model" if config.get("position_encoding_2d") is True else None


@family(
    "ChatGLMModel",
    "ChatGLMForConditionalGeneration",
    keys="add_bias_linear add_qkv_bias multi_query_attention multi_query_group_num original_rope "
    "post_layer_norm rmsnorm rope_ratio",
    activation_key="activation",
    activations={"swiglu": Activation.SILU},
    has_windows=False,
    read_ropes=read_partial_rope,
    aliases=ALIASES,
    derived=derived,
    tensors=TensorNames(
        NAMES, unread=(".rotary_pos_emb.inv_freq",), qkv=QkvOrder.BLOCKS, joins_gate_up=True
    ),
    config_class=CLASS,
    generation=generation,
    gguf=GgufForm(
        "chatglm",
        qkv=QkvOrder.BLOCKS,
        joins_gate_up=True,
        is_partial=True,
        flags={"add_qkv_bias": "attn_qkv.bias", "add_bias_linear": "ffn_down.bias"},
        config=gguf_config,
    ),
)
def chatglm(config: Reader) -> Axes:
    """Read whether q, k and v have biases, and whether all matrices have."""
    bias = config.flag("add_bias_linear", default=False)
    qkv = config.flag("add_qkv_bias", default=False)
    return Axes(interleaved=True, qkv_bias=qkv or bias, out_bias=bias, mlp_bias=bias)
