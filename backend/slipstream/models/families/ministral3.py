"""Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with their position."""

from collections.abc import Mapping

from slipstream.models.axes import Axes, Growth
from slipstream.models.family import family
from slipstream.models.gguf_form import MAGNITUDE, GgufForm, GgufKeys
from slipstream.models.reader import Reader
from slipstream.models.ropes import rope_key

BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
STRETCHED = ("llama3", "yarn", "longrope")
_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384, BETA: 0.1}
_ROPE |= {"mscale_all_dim": 1.0, "mscale": 1.0}


def derived(config: Reader) -> Mapping[str, object]:
    """Return the rotation without what it says of queries, and that beside it."""
    key = rope_key(config)
    rope = config.child(key)
    if not rope.data:
        rope = Reader(_ROPE, "transformers' class")
    if BETA not in rope.data:
        raise rope.refusal(BETA, "is no number: queries have no factor")
    kept = {name: value for name, value in rope.data.items() if name != BETA}
    growth = None if rope.data[BETA] == 0 else (rope.positive(BETA), _every(config, rope))
    return {key: kept, BETA: growth}


def _every(config: Reader, rope: Reader) -> int:
    """Return after how many positions queries grow: the context before it was stretched."""
    if (rope.get("rope_type") or rope.get("type")) not in STRETCHED:
        return rope.whole(ORIGINAL)
    most = config.whole("max_position_embeddings")
    return config.whole(ORIGINAL, rope.whole(ORIGINAL, most))


def gguf_rope(keys: GgufKeys) -> dict[str, object]:
    """Return how queries grow, and that a stretched rotation leaves the length of heads."""
    key = "attention.temperature_scale"
    found: dict[str, object] = {BETA: keys.positive(key) if keys.get(key) else 0.0}
    if keys.get(MAGNITUDE):
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), keys.positive(MAGNITUDE))
    return found


@family(
    "Ministral3ForCausalLM",
    derived=derived,
    gguf=GgufForm(
        "mistral3",
        pairs_rows=True,
        numbers={"sliding_window": "attention.sliding_window"},
        rope=gguf_rope,
    ),
)
def ministral3(config: Reader) -> Axes:
    """Read how queries grow."""
    growth = config.get(BETA)
    assert growth is None or isinstance(growth, tuple), "`derived` made it"
    return Axes(query_growth=None if growth is None else Growth(*growth))
