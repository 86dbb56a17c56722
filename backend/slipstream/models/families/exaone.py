"""EXAONE 3 and 3.5 (LG AI Research, 2024): Llama under names of GPT-2. transformers lacks it."""

from collections.abc import Mapping

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader

CLASS = own_class(
    "exaone",
    vocab_size=102400,
    max_position_embeddings=2048,
    hidden_size=2048,
    num_layers=32,
    num_hidden_layers=None,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    intermediate_size=None,
    activation_function="silu",
    rope_theta=10000.0,
    rope_scaling=None,
    embed_dropout=0.0,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
    eos_token_id=2,
)
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn": "attn.attention",
    "self_attn.o_proj": "attn.attention.out_proj",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


def derived(config: Reader) -> Mapping[str, object]:
    """Return the size of the MLP where config.json does not say."""
    if config.has("intermediate_size"):
        return {}
    return {"intermediate_size": 4 * config.whole("hidden_size")}


@family(
    "ExaoneForCausalLM",
    keys="embed_dropout",
    activation_key="activation_function",
    has_windows=False,
    aliases="num_hidden_layers=num_layers rms_norm_eps=layer_norm_epsilon",
    derived=derived,
    tensors=TensorNames(NAMES, unread=(".rotary.inv_freq", ".rotary_emb.inv_freq")),
    gguf=GgufForm("exaone"),
    config_class=CLASS,
)
def exaone(config: Reader) -> Axes:
    """Return the axes, which no key of config.json changes."""
    return Axes()
