"""Qwen (Bai et al., 2023), the first: Llama with q, k and v in one matrix, with biases."""

from collections.abc import Mapping

from slipstream.models.axes import Activation, Axes, QkvOrder, TensorNames, joined
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.reader import Reader

CLASS = own_class(
    "qwen", vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
    num_attention_heads=32, kv_channels=128, layer_norm_epsilon=1e-6, rotary_emb_base=10000,
    rotary_pct=1.0, seq_length=2048, max_position_embeddings=8192, no_bias=True,
    scale_attn_weights=True, tie_word_embeddings=False, use_cache_quantization=False,
    eos_token_id=151643,
)  # fmt: skip
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    **joined("attn.c_attn"),
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return sizes; factors of long sequences are 1 up to `seq_length`, where they end here."""
    config.refuse_unless("scale_attn_weights", value=True)
    inner = config.whole("intermediate_size")
    if inner % 2:
        raise config.refusal("intermediate_size", "is not the width of two matrices")
    length = min(config.whole("seq_length"), config.whole("max_position_embeddings"))
    return {
        "intermediate_size": inner // 2,
        "max_position_embeddings": length,
        "num_key_value_heads": None,
        "activation": "swiglu",
    }


@family(
    "QWenLMHeadModel",
    keys="seq_length no_bias scale_attn_weights",
    activation_key="activation",
    activations={"swiglu": Activation.SILU},
    has_windows=False,
    aliases="rms_norm_eps=layer_norm_epsilon rope_theta=rotary_emb_base head_dim=kv_channels "
    "partial_rotary_factor=rotary_pct",
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.BLOCKS),
    config_class=CLASS,
)
def qwen(config: Reader) -> Axes:
    """Read whether the other matrices have biases."""
    bias = not config.flag("no_bias", default=True)
    return Axes(qkv_bias=True, out_bias=bias, mlp_bias=bias)
