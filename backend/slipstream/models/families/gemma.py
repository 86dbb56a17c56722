"""Gemma (Gemma Team, 2024): norms of 1 + weight, scaled embeddings, a gate of GELU."""

from slipstream.models.axes import Activation, Axes, NormKind
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


@family(
    "GemmaForCausalLM",
    keys="attention_bias",
    # The first files say "gelu": they mean the tanh that the weights were trained with.
    activations={
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "gelu": Activation.GELU_TANH,
    },
    has_windows=False,
    gguf=GgufForm("gemma", norms_added=1.0, flags={"attention_bias": "attn_q.bias"}),
)
def gemma(config: Reader) -> Axes:
    """Read whether all attention matrices have biases; the embedding is scaled."""
    bias = config.flag("attention_bias", default=False)
    return Axes(
        norm=NormKind.ONE_PLUS_WEIGHT,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=float(config.whole("hidden_size") ** 0.5),
    )
