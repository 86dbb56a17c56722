"""MPT (MosaicML, 2023), later files of Replit Code: layer norms, ALiBi or learned positions."""

from collections.abc import Mapping

from slipstream.models.alibi import slopes_from
from slipstream.models.axes import (
    Activation,
    Axes,
    NormKind,
    QkNorms,
    QkvOrder,
    TensorNames,
    joined,
)
from slipstream.models.config_class import HARMLESS, read_config_class
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader, words
from slipstream.models.ropes import no_rope

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.layers": "transformer.blocks",
    "model.norm": "transformer.norm_f",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    **joined("attn.Wqkv"),
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.q_norm": "attn.q_ln",
    "self_attn.k_norm": "attn.k_ln",
    "mlp": "ffn",
}
READ = words("alibi alibi_bias_max attn_type clip_qkv kv_n_heads qk_ln softmax_scale")
UNUSED = words("attn_impl attn_pdrop attn_uses_sequence_id")  # of training, or of their code
NEUTRAL = {**read_config_class("MptForCausalLM").defaults, "sliding_window_size": -1}
ALIASES = "hidden_size=d_model num_attention_heads=n_heads num_hidden_layers=n_layers"
ALIASES += " max_position_embeddings=max_seq_len rms_norm_eps=layer_norm_epsilon"

_MOST = 1 << 10  # times the hidden size


def attention(config: Reader) -> Reader:
    """Return the keys of `attn_config`; refuse others that ask for something."""
    own = config.child("attn_config")
    for key in own.data.keys() - READ - UNUSED - HARMLESS:
        if own.data[key] not in (NEUTRAL.get(key), None, False, ""):
            raise own.refusal(key, "is not implemented")
    return own


def derived(config: Reader) -> Mapping[str, object]:
    """Return what follows from MPT's own keys; refuse other norms, and other kinds of attention."""
    own, heads = attention(config), config.whole("num_attention_heads")
    kinds = {"multihead_attention": heads, "multiquery_attention": 1}
    kind = own.data.get("attn_type", "multihead_attention")
    if not isinstance(kind, str) or (kind not in kinds and kind != "grouped_query_attention"):
        raise own.refusal("attn_type", "is not implemented")
    if config.get("norm_type") not in ("low_precision_layernorm", "layernorm"):
        raise config.refusal("norm_type", "is not implemented; layernorm is")
    return {
        "num_key_value_heads": kinds.get(str(kind)) or own.whole("kv_n_heads"),
        "head_dim": None,
        "intermediate_size": config.whole("expansion_ratio", most=_MOST)
        * config.whole("hidden_size"),
        "hidden_act": "gelu",
    }


def logit_scale(config: Reader) -> float:
    """Return the factor of logits, which may be a name."""
    if config.get("logit_scale") == "inv_sqrt_d_model":
        return float(config.whole("hidden_size") ** -0.5)
    return config.positive("logit_scale", 1.0)


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the keys of attention, and others that the tensors of a GGUF file decide."""
    alibi, most = keys.get("attention.max_alibi_bias"), keys.get("attention.clamp_kqv")
    heads, kv_heads = keys.num_heads, keys.num_kv_heads
    kind = "grouped_query_attention" if kv_heads != heads else "multihead_attention"
    own = {"alibi": bool(alibi), "attn_type": kind, "kv_n_heads": kv_heads}
    own |= {"alibi_bias_max": alibi} if alibi else {}
    own |= {"clip_qkv": most} if most else {}
    return {
        "attn_config": own | {"qk_ln": "blk.0.attn_q_norm.weight" in keys.tensors},
        "expansion_ratio": keys.whole("feed_forward_length") // keys.whole("embedding_length"),
        "learned_pos_emb": "position_embd.weight" in keys.tensors,
        "no_bias": "blk.0.attn_qkv.bias" not in keys.tensors,
    }


@family(
    "MptForCausalLM",
    "MPTForCausalLM",  # as the published checkpoints say
    config_class=read_config_class("MptForCausalLM"),
    keys="attn_config expansion_ratio learned_pos_emb logit_scale no_bias norm_type",
    activations={"gelu": Activation.GELU},
    has_windows=False,
    read_ropes=no_rope,
    aliases=ALIASES,
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.BLOCKS),
    gguf=GgufForm("mpt", qkv=QkvOrder.BLOCKS, config=gguf_config),
)
def mpt(config: Reader) -> Axes:
    """Read positions, biases and what becomes of queries and keys."""
    own, bias = attention(config), not config.flag("no_bias", default=True)
    heads, is_alibi = config.whole("num_attention_heads"), own.flag("alibi", default=True)
    return Axes(
        norm=NormKind.LAYER if bias else NormKind.LAYER_WITHOUT_BIAS,
        qk_norms=QkNorms.LAYER_WHOLE if own.flag("qk_ln", default=False) else QkNorms.NONE,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qkv_most=own.positive("clip_qkv") if own.has("clip_qkv") else None,
        attention_scale=own.positive("softmax_scale") if own.has("softmax_scale") else None,
        slopes=slopes_from(heads, own.positive("alibi_bias_max", 8.0)) if is_alibi else (),
        gated=False,
        learned_positions=not is_alibi and config.flag("learned_pos_emb", default=True),
        logit_scale=logit_scale(config),
    )
