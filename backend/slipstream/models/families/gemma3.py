"""Gemma 3, text (Gemma Team, 2025): most layers have a window, every sixth full attention.

Norms stand before and after both halves of a block; their stored weights are smaller by 1.
"""

from slipstream.models.axes import Activation, Axes, NormKind, QkNorms, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys, windows_of
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_ropes
from slipstream.models.wrapped import Whole, wraps

NAMES = {
    "attention_out_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

# From 4B on, as published: with a tower for images.
wraps(
    "Gemma3ForConditionalGeneration",
    Whole("gemma3", {"gemma3_text": "Gemma3ForCausalLM"}, ties=True),
)
_EVERY = 6  # so many layers, one has full attention
_LAYERS_OF_27B = 62  # the one size whose queries are scaled by another number than that of a head


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return what GGUF files say of windows, and what they leave to the reader's knowledge."""
    hidden, heads = keys.whole("embedding_length"), keys.num_heads
    is_27b = keys.whole("block_count") == _LAYERS_OF_27B
    return windows_of(keys, _EVERY) | {
        "sliding_window": keys.whole("attention.sliding_window"),
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": hidden // heads if is_27b else keys.whole("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


@family(
    "Gemma3ForCausalLM",
    keys="attention_bias query_pre_attn_scalar rope_local_base_freq sliding_window_pattern",
    activation_key="hidden_activation",
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    read_ropes=read_ropes,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("gemma3", norms_added=1.0, config=gguf_config),
)
def gemma3(config: Reader) -> Axes:
    """Read whether all attention matrices have biases; the embedding is scaled."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        norm=NormKind.ONE_PLUS_WEIGHT,
        norms_behind=True,
        qk_norms=QkNorms.HEADS,
        qkv_bias=bias,
        out_bias=bias,
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        embedding_scale=float(config.whole("hidden_size") ** 0.5),
    )
