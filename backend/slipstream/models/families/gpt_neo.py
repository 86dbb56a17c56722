"""GPT-Neo (Black et al., 2021): GPT-2 with scores as they are, and windows in every other layer."""

from collections.abc import Mapping

from slipstream.models.axes import ACTIVATIONS, Axes, NormKind, TensorNames
from slipstream.models.families import gpt2
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.ropes import no_rope

ATTENTION = "attn.attention"
KEPT = (
    *("model.embed_tokens", "model.embed_positions", "model.layers", "model.norm"),
    *("input_layernorm", "post_attention_layernorm", "mlp.up_proj", "mlp.down_proj"),
)
NAMES = {name: gpt2.NAMES[name] for name in KEPT}
NAMES |= {"self_attn": ATTENTION, "self_attn.o_proj": f"{ATTENTION}.out_proj"}
MOST_LAYERS = 10_000
KINDS = {"global": "full_attention", "local": "sliding_attention"}


def layer_types(config: Reader) -> list[str]:
    """Return the kind of each layer: `attention_types` has lists of kinds, each so many times."""
    count = config.whole("num_hidden_layers", most=MOST_LAYERS)
    types = config.get("attention_types") or [[["global", "local"], 12]]
    found: list[str] = []
    for each in types if isinstance(types, list) else ():
        kinds, times = each if isinstance(each, list) and len(each) == 2 else ((), 0)
        is_known = isinstance(kinds, list) and all(kind in ("global", "local") for kind in kinds)
        if is_known and type(times) is int and 0 < times * len(kinds) <= count:
            found += [KINDS[kind] for kind in kinds] * times
    if len(found) != count:
        raise config.refusal("attention_types", f"is not [[kinds, times], ...] of {count} layers")
    named = {kind: name for name, kind in KINDS.items()}
    config.refuse_unless("attention_layers", [named[kind] for kind in found])
    return found


def derived(config: Reader) -> Mapping[str, object]:
    """Return the MLP's width, and which layers have a window."""
    kinds = layer_types(config)
    window = config.whole("window_size") if KINDS["local"] in kinds else None
    return {**gpt2.derived(config), "layer_types": kinds, "sliding_window": window}


@family(
    "GPTNeoForCausalLM",
    keys="attention_types attention_layers window_size resid_dropout embed_dropout",
    activation_key="activation_function",
    activations=ACTIVATIONS,
    read_ropes=no_rope,
    aliases="num_hidden_layers=num_layers num_attention_heads=num_heads "
    "rms_norm_eps=layer_norm_epsilon",
    derived=derived,
    tensors=TensorNames(
        NAMES,
        unread=(f".{ATTENTION}.bias", f".{ATTENTION}.masked_bias"),
    ),
)
def gpt_neo(config: Reader) -> Axes:
    """Return the axes, of which the attention's layers are read before."""
    return Axes(
        norm=NormKind.LAYER,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        learned_positions=True,
        attention_scale=1.0,
    )
