"""Falcon (Almazrouei et al., 2023): parallel residuals, few heads of keys, three layouts; ALiBi."""

from collections.abc import Mapping

from slipstream.layers.dims import RopeConfig
from slipstream.models.alibi import bfloat16, slopes
from slipstream.models.axes import (
    ACTIVATIONS,
    Axes,
    NormKind,
    QkvOrder,
    Residuals,
    TensorNames,
    joined,
)
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope, read_rope

NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    **joined("self_attention.query_key_value"),
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
KEYS = "num_ln_in_parallel_attn num_kv_heads alibi new_decoder_architecture multi_query"
KEYS += " parallel_attn bias"


def residuals(config: Reader) -> Residuals:
    """Return which norms attention and MLP read."""
    is_new = config.flag("new_decoder_architecture", default=False)
    if not config.flag("parallel_attn", default=True):
        config.refuse_unless("new_decoder_architecture", False)
        return Residuals.SERIAL
    norms = config.whole("num_ln_in_parallel_attn", 2 if is_new else 1, 2)
    if norms == 2 and not is_new:
        raise config.refusal("num_ln_in_parallel_attn", "needs new_decoder_architecture")
    return Residuals.TWO_NORMS if norms == 2 else Residuals.ONE_NORM


def derived(config: Reader) -> Mapping[str, object]:
    """Return heads of keys and values, and the MLP's width."""
    heads = config.whole("num_attention_heads")
    is_one = config.flag("multi_query", default=True)
    kv_heads = config.whole("num_kv_heads", heads)
    if not config.flag("new_decoder_architecture", default=False):
        if not is_one:
            config.refuse_unless("num_kv_heads", heads)
        kv_heads = 1 if is_one else heads
    inner = config.whole("intermediate_size", 4 * config.whole("hidden_size"))
    return {"num_key_value_heads": kv_heads, "head_dim": None, "intermediate_size": inner}


def tensors(config: Reader) -> TensorNames:
    """Return names: one norm or two; q, k and v by groups of heads, which may be one."""
    own = NAMES | (TWO_NORMS if residuals(config) is Residuals.TWO_NORMS else {})
    return TensorNames(own, qkv=QkvOrder.GROUPS)


def ropes(config: Reader, max_positions: int, size: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotation, which models with ALiBi do not have."""
    read = no_rope if config.flag("alibi", default=False) else read_rope
    return read(config, max_positions, size)


def falcon_slopes(config: Reader) -> tuple[float, ...]:
    """Return what ALiBi adds: slopes in bfloat16, which the scale of scores multiplies, too."""
    if not config.flag("alibi", default=False):
        return ()
    heads = config.whole("num_attention_heads")
    scale = (config.whole("hidden_size") // heads) ** -0.5
    return tuple(bfloat16(slope) * scale for slope in slopes(heads))


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return which of the layouts a GGUF file has, by its heads and norms."""
    norms = 1 + ("blk.0.attn_norm_2.weight" in keys.tensors)
    is_new = norms == 2 or keys.num_kv_heads not in (1, keys.num_heads)
    return {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": norms,
        "num_kv_heads": keys.num_kv_heads,
        "multi_query": keys.num_kv_heads == 1,
        "parallel_attn": "blk.0.ffn_norm.weight" not in keys.tensors,
        "bias": "blk.0.attn_qkv.bias" in keys.tensors,
    }


@family(
    "FalconForCausalLM",
    keys=KEYS,
    activation_key="activation",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=ropes,
    aliases="rms_norm_eps=layer_norm_epsilon hidden_size=n_embed intermediate_size=ffn_hidden_size",
    derived=derived,
    tensors=tensors,
    gguf=GgufForm("falcon", qkv=QkvOrder.BLOCKS, config=gguf_config),
)
def falcon(config: Reader) -> Axes:
    """Read residuals, biases and ALiBi."""
    bias, kind = config.flag("bias", default=False), residuals(config)
    return Axes(
        norm=NormKind.LAYER,
        residuals=kind,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        slopes=falcon_slopes(config),
        gated=False,
    )
