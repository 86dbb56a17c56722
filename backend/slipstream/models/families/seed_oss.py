"""Seed-OSS (ByteDance, 2025): Llama with biases on q, k and v."""

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "SeedOssForCausalLM",
    keys="attention_bias attention_out_bias mlp_bias residual_dropout",
    has_windows=False,
    gguf=GgufForm(
        "seed_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        flags={
            "attention_bias": "attn_q.bias",
            "attention_out_bias": "attn_output.bias",
            "mlp_bias": "ffn_up.bias",
        },
    ),
)
def seed_oss(config: Reader) -> Axes:
    """Read biases."""
    return Axes(
        qkv_bias=config.flag("attention_bias", default=True),
        out_bias=config.flag("attention_out_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
