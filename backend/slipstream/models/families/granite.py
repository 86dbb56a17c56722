"""Granite (IBM, 2024): Llama with four factors: of embeddings, scores, results and logits."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader

KEYS = "attention_bias embedding_multiplier attention_multiplier residual_multiplier logits_scaling"

GGUF_NUMBERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


@family(
    "GraniteForCausalLM",
    keys=f"{KEYS} mlp_bias",
    has_windows=False,
    gguf=GgufForm(
        "granite",
        pairs_rows=True,
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        numbers=GGUF_NUMBERS,
    ),
)
def granite(config: Reader) -> Axes:
    """Read biases of attention and MLP, and the factors."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )
