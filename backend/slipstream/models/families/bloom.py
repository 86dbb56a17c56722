"""BLOOM (BigScience, 2022), BLOOMZ: ALiBi, a norm behind the embedding, biases everywhere."""

from collections.abc import Mapping

from slipstream_contract.limits import INT32_MAX

from slipstream.models.alibi import slopes
from slipstream.models.axes import (
    Activation,
    Axes,
    NormKind,
    QkvOrder,
    Residuals,
    TensorNames,
    joined,
)
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope

NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.embed_norm": "transformer.word_embeddings_layernorm",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    **joined("self_attention.query_key_value"),
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
KEYS = "hidden_size=n_embed num_hidden_layers=n_layer num_attention_heads=n_head"


def derived(config: Reader) -> Mapping[str, object]:
    """Return what no key says; a context may be longer than that of the training."""
    return {
        "num_key_value_heads": None,
        "head_dim": None,
        "intermediate_size": 4 * config.whole("hidden_size"),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": config.whole("seq_length", 2048, INT32_MAX),
    }


@family(
    "BloomForCausalLM",
    keys="apply_residual_connection_post_layernorm slow_but_exact seq_length",
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    has_windows=False,
    read_ropes=no_rope,
    aliases=f"{KEYS} rms_norm_eps=layer_norm_epsilon",
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.HEADS),
    gguf=GgufForm("bloom", qkv=QkvOrder.BLOCKS, numbers={"seq_length": "context_length"}),
)
def bloom(config: Reader) -> Axes:
    """Read what is added to; the number of heads decides slopes."""
    key = "apply_residual_connection_post_layernorm"
    is_normed = config.flag(key, default=False)
    return Axes(
        norm=NormKind.LAYER,
        residuals=Residuals.OF_NORMS if is_normed else Residuals.SERIAL,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        slopes=slopes(config.whole("num_attention_heads")),
        gated=False,
        embedding_norm=True,
    )
