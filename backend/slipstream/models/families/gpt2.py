"""GPT-2 (Radford et al., 2019): layer norms, learned positions, matrices stored transposed."""

from collections.abc import Mapping

from slipstream.models.axes import (
    ACTIVATIONS,
    Axes,
    NormKind,
    QkvOrder,
    TensorNames,
    joined,
)
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    **joined("attn.c_attn"),
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
TENSORS = TensorNames(
    NAMES,
    unread=(".attn.bias", ".attn.masked_bias"),
    qkv=QkvOrder.BLOCKS,
    transposed=(*QKV, "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
)
AXES = Axes(
    norm=NormKind.LAYER,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    gated=False,
    learned_positions=True,
)
KEYS = "hidden_size=n_embd num_hidden_layers=n_layer num_attention_heads=n_head"
KEYS += " max_position_embeddings=n_positions intermediate_size=n_inner"
KEYS += " rms_norm_eps=layer_norm_epsilon"


def derived(config: Reader) -> Mapping[str, object]:
    """Return the MLP's width, four times the hidden size if it is not given."""
    inner = config.whole("intermediate_size", 4 * config.whole("hidden_size"))
    return {"intermediate_size": inner, "num_key_value_heads": None, "head_dim": None}


@family(
    "GPT2LMHeadModel",
    activation_key="activation_function",
    activations=ACTIVATIONS,
    has_windows=False,
    read_ropes=no_rope,
    aliases=KEYS,
    derived=derived,
    tensors=TENSORS,
    gguf=GgufForm("gpt2", qkv=QkvOrder.BLOCKS),
)
def gpt2(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return AXES
