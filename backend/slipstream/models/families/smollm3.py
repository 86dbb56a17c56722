"""SmolLM3 (Bakouch et al., 2025): Llama in which every fourth layer does not rotate."""

from collections.abc import Mapping

from slipstream.models.axes import Axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader


def still(config: Reader, num_layers: int) -> frozenset[int]:
    """Return the layers that do not rotate: those with 0 in `no_rope_layers`, else every n-th."""
    key = "no_rope_layers"
    rotates = config.get(key)
    if rotates is None:
        every = config.whole("no_rope_layer_interval")
        return frozenset(range(every - 1, num_layers, every))
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        raise config.refusal(key, f"is not a list of {num_layers} numbers")
    if not all(each in (0, 1) for each in rotates):
        raise config.refusal(key, "has numbers other than 0 and 1")
    return frozenset(i for i, each in enumerate(rotates) if not each)


def derived(config: Reader) -> Mapping[str, object]:
    """Return which layers have a window where config.json does not say: those that are still."""
    if config.has("layer_types") or not config.flag("use_sliding_window", default=False):
        return {}
    num_layers = config.whole("num_hidden_layers")
    layers = still(config, num_layers)
    kinds = ("full_attention", "sliding_attention")
    window = config.has("sliding_window")
    return {"layer_types": [kinds[window and i in layers] for i in range(num_layers)]}


@family(
    "SmolLM3ForCausalLM",
    keys="attention_bias mlp_bias no_rope_layers no_rope_layer_interval use_sliding_window",
    still=still,
    derived=derived,
    gguf=GgufForm(
        "smollm3",
        pairs_rows=True,
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    ),
)
def smollm3(config: Reader) -> Axes:
    """Read whether all attention matrices have biases, and all matrices of the MLP."""
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return Axes(qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
