"""InternLM (2023): Llama with biases of all attention matrices. transformers lacks it."""

from collections.abc import Mapping

from slipstream.models.axes import Axes
from slipstream.models.config_class import own_class
from slipstream.models.family import family
from slipstream.models.reader import Reader

CLASS = own_class(
    "internlm",
    vocab_size=103168,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    hidden_act="silu",
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    bias=True,
    rotary={"base": 10000, "type": "dynamic"},
    eos_token_id=2,
)


def derived(config: Reader) -> Mapping[str, object]:
    """Return theta. Both kinds are the plain one within the context, where sequences end here."""
    rotary = config.child("rotary")
    kind = rotary.get("type")
    if kind not in (None, "origin", "dynamic"):
        raise rotary.refusal("type", "is not implemented; origin and dynamic are")
    return {"rope_theta": rotary.positive("base", 10000.0)}


@family(
    "InternLMForCausalLM",
    keys="bias rotary",
    has_windows=False,
    derived=derived,
    config_class=CLASS,
)
def internlm(config: Reader) -> Axes:
    """Read whether all attention matrices have biases."""
    bias = config.flag("bias", default=True)
    return Axes(qkv_bias=bias, out_bias=bias)
