"""Replit Code 1 (2023) as first published, and MosaicML's models before MPT: ALiBi, layer norms.

Later files of the same model are MPT's. transformers lacks it.
"""

from collections.abc import Mapping

from slipstream.models.axes import (
    Activation,
    Axes,
    NormKind,
    QkNorms,
    QkvOrder,
    TensorNames,
    joined,
)
from slipstream.models.config_class import own_class
from slipstream.models.families.mpt import logit_scale
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope

CLASS = own_class(
    "replit_lm", "mosaic_gpt", d_model=2048, n_heads=16, n_layers=24, mlp_ratio=4, max_seq_len=2048,
    vocab_size=50368, attn_clip_qkv=None, attn_qk_ln=False, softmax_scale=None, alibi=False,
    alibi_bias_max=8, no_bias=False, logit_scale=None, prefix_lm=False, layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
)  # fmt: skip
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.layers": "transformer.blocks",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    **joined("attn.Wqkv"),
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.q_norm": "attn.q_ln",
    "self_attn.k_norm": "attn.k_ln",
    "mlp.up_proj": "mlp.mlp_up",
    "mlp.down_proj": "mlp.mlp_down",
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return what follows from its own keys."""
    return {
        "num_key_value_heads": None,
        "head_dim": None,
        "intermediate_size": config.whole("mlp_ratio") * config.whole("hidden_size"),
        "hidden_act": "gelu",
    }


@family(
    "ReplitLM",
    "MosaicGPT",
    config_class=CLASS,
    keys="alibi alibi_bias_max attn_clip_qkv attn_qk_ln softmax_scale mlp_ratio no_bias "
    "logit_scale",
    activations={"gelu": Activation.GELU},
    has_windows=False,
    read_ropes=no_rope,
    aliases="hidden_size=d_model num_attention_heads=n_heads num_hidden_layers=n_layers "
    "max_position_embeddings=max_seq_len rms_norm_eps=layer_norm_epsilon",
    derived=derived,
    tensors=TensorNames(NAMES, qkv=QkvOrder.BLOCKS),
    said={"alibi": True, "no_bias": True},
)
def replit_lm(config: Reader) -> Axes:
    """Read positions, biases and what becomes of queries and keys.

    Slopes are `2 ** -(i most / n)` of n heads, whether or not these are a power of two.
    """
    heads, bias = config.whole("num_attention_heads"), not config.flag("no_bias", default=False)
    is_alibi, most = config.flag("alibi", default=False), config.positive("alibi_bias_max", 8.0)
    return Axes(
        norm=NormKind.LAYER if bias else NormKind.LAYER_WITHOUT_BIAS,
        qk_norms=QkNorms.LAYER_WHOLE if config.flag("attn_qk_ln", default=False) else QkNorms.NONE,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qkv_most=config.positive("attn_clip_qkv") if config.has("attn_clip_qkv") else None,
        attention_scale=config.positive("softmax_scale") if config.has("softmax_scale") else None,
        slopes=tuple(2 ** (-most * i / heads) for i in range(1, heads + 1)) if is_alibi else (),
        gated=False,
        learned_positions=not is_alibi,
        logit_scale=logit_scale(config),
    )
