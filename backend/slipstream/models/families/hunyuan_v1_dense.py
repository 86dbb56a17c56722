"""Hunyuan (Tencent, 2025): heads normalised behind their rotation, theta stretched by `alpha`."""

from collections.abc import Mapping

from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.ropes import rope_key

NAMES = {"self_attn.q_norm": "self_attn.query_layernorm"}
NAMES |= {"self_attn.k_norm": "self_attn.key_layernorm"}
_SCALING = ("yarn", "longrope")  # kinds that change the length of rotated heads
MOST_ALPHA = 1e18  # that leaves theta a number


def derived(config: Reader) -> Mapping[str, object]:
    """Return the rotation with theta as `alpha` makes it, which `dynamic` calls so alone here."""
    key = rope_key(config)
    rope = config.child(key)
    named = "rope_type" if rope.has("rope_type") else "type"
    if rope.data.get(named) in _SCALING:
        raise rope.refusal(named, "is not implemented where norms come behind the rotation")
    if rope.data.get(named) != "dynamic" or not rope.data.get("alpha"):
        return {}
    heads = config.whole("num_attention_heads")
    size = config.whole("head_dim", config.whole("hidden_size") // heads)
    if size <= 2:
        raise config.refusal("head_dim", f"gives heads of {size}: alpha needs more than 2")
    theta = rope.positive("rope_theta", config.positive("rope_theta"))
    theta *= rope.positive("alpha", most=MOST_ALPHA) ** (size / (size - 2))
    return {key: {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}


@family(
    "HunYuanDenseV1ForCausalLM",
    keys="attention_bias eod_token_id",
    has_windows=False,
    derived=derived,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("hunyuan-dense", flags={"attention_bias": "attn_q.bias"}),
)
def hunyuan(config: Reader) -> Axes:
    """Read whether attention has biases."""
    bias = config.flag("attention_bias", default=False)
    return Axes(qk_norms=QkNorms.HEADS, late_norms=True, qkv_bias=bias, out_bias=bias)
