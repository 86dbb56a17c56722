"""MiniCPM 1, 2 and 4 (Hu et al., 2024): Llama with factors by depth and width.

transformers lacks it.
"""

from slipstream.models.axes import Axes
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader

CLASS = own_class(
    "minicpm",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    hidden_act="silu",
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_bias=False,
    rope_theta=10000.0,
    rope_scaling=None,
    scale_emb=1,
    dim_model_base=1,
    scale_depth=1,
    num_experts=0,
    sparse_config=None,
    eos_token_id=2,
)


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the factors of a GGUF file, which says that of results as it is in this depth."""
    layers, hidden = keys.whole("block_count"), keys.whole("embedding_length")
    return {
        "scale_emb": keys.positive("embedding_scale"),
        "scale_depth": keys.positive("residual_scale") * layers**0.5,
        "dim_model_base": hidden / keys.positive("logit_scale"),
    }


@family(
    "MiniCPMForCausalLM",
    keys="attention_bias scale_emb scale_depth dim_model_base",
    has_windows=False,
    gguf=GgufForm("minicpm", pairs_rows=True, config=gguf_config),
    config_class=CLASS,
)
def minicpm(config: Reader) -> Axes:
    """Read biases, and the factors of embeddings, results and logits."""
    bias = config.flag("attention_bias", default=False)
    layers, hidden = config.whole("num_hidden_layers"), config.whole("hidden_size")
    return Axes(
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=config.positive("scale_emb", 1.0),
        residual_scale=config.positive("scale_depth", 1.0) * layers**-0.5,
        logit_scale=config.positive("dim_model_base", 1.0) / hidden,
    )
