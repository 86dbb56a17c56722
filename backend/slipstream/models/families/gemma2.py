"""Gemma 2 (Gemma Team, 2024): norms on both sides, windows in half of the layers, capped scores."""

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.axes import Activation, Axes, TensorNames
from slipstream.models.families.gemma import gemma
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys
from slipstream.models.reader import Reader

NAMES = {
    "attention_out_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_LAYERS_OF_27B = 46  # the one size whose queries are scaled by another number than that of a head
_EVERY = 2  # so many layers, one has full attention


def derived(config: Reader) -> Mapping[str, object]:
    """Return which layers have a window where config.json does not say."""
    return {} if config.has("layer_types") else {"sliding_window_pattern": _EVERY}


def _cap(config: Reader, key: str) -> float:
    return config.positive(key) if config.has(key) else 0.0


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return caps and the window of a GGUF file, and the scale, which it leaves to the reader."""
    is_27b = keys.whole("block_count") == _LAYERS_OF_27B
    hidden, heads = keys.whole("embedding_length"), keys.num_heads
    size = keys.whole("attention.key_length", hidden // heads)
    return {
        "sliding_window": keys.whole("attention.sliding_window"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "query_pre_attn_scalar": hidden // heads if is_27b else size,
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


@family(
    "Gemma2ForCausalLM",
    keys="attention_bias query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping",
    activation_key="hidden_activation",
    activations={"gelu_pytorch_tanh": Activation.GELU_TANH},
    derived=derived,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("gemma2", norms_added=1.0, config=gguf_config),
)
def gemma2(config: Reader) -> Axes:
    """Read the scale of scores, and the caps of scores and of logits."""
    return replace(
        gemma(config),
        norms_behind=True,
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        score_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
    )
