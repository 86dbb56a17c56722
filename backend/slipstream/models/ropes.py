"""Read the rotary embedding from a `config.json`. No torch."""

import math
from collections.abc import Sequence
from dataclasses import replace

from slipstream_contract.errors import clip
from slipstream_contract.limits import INT32_MAX

from slipstream.layers.dims import RopeConfig
from slipstream.models.reader import Reader, words

_ROPE_KEYS = {
    "default": words(""),
    "linear": words("factor"),
    "dynamic": words("factor"),
    "llama3": words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": words(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate finetuned"
    ),
    "longrope": words(
        "factor original_max_position_embeddings attention_factor short_factor long_factor"
    ),
}
_ROPE_COMMON = words("type rope_type rope_theta partial_rotary_factor")
# Keys of some kind of rotary embedding, here or in transformers: another kind refuses them.
_OTHER_KEYS = words("short_factor long_factor alpha mrope_section").union(*_ROPE_KEYS.values())

_MAGNITUDES = ("short_mscale", "long_mscale")
_ORIGINAL = "original_max_position_embeddings"
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
_KEYS_OF_CONFIG = words(
    "rope_theta rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor"
)


STILL = RopeConfig(rotated=0)  # of layers that do not rotate


def rope_key(config: Reader) -> str:
    """Return the key of the rotation: that of transformers 5, or without it the one before."""
    return "rope_parameters" if config.has("rope_parameters") else "rope_scaling"


def by_layer(config: Reader, ropes: Sequence[RopeConfig]) -> tuple[RopeConfig, ...]:
    """Return the rotations of layers, with thetas of `layer_rope_theta`; 0: it does not rotate."""
    key = "layer_rope_theta"
    thetas = config.get(key)
    if thetas is None:
        return tuple(ropes)
    if not isinstance(thetas, list) or len(thetas) != len(ropes):
        raise config.refusal(key, f"is not a list of {len(ropes)} numbers")
    if not all(_is_positive(theta) or theta in (0, None) for theta in thetas):
        raise config.refusal(key, "has what is no number >= 0")
    if any(rope.kind == "yarn" for rope in ropes) and any(theta and theta <= 1 for theta in thetas):
        raise config.refusal(key, "has thetas up to 1: yarn needs more")
    return tuple(
        replace(rope, theta=float(theta)) if theta else STILL
        for rope, theta in zip(ropes, thetas, strict=True)
    )


def no_rope(config: Reader, max_positions: int, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Return what rotates nothing, twice; keys of rotary embeddings change nothing."""
    for key in config.data.keys() & _KEYS_OF_CONFIG:
        config.ignore(key)
    return STILL, STILL


def read_rope(
    config: Reader, max_positions: int, head_size: int, is_partial: bool = False
) -> tuple[RopeConfig, RopeConfig]:
    """Read one embedding for all layers; return it twice: for full attention and for windows.

    It is in `rope_parameters` (transformers 5) or `rope_scaling` (before). As in transformers, an
    `original_max_position_embeddings` beside either wins over the one inside.
    """
    new, old = config.child("rope_parameters"), config.child("rope_scaling")
    if new.data and old.data and new.data != old.data:
        raise config.refusal("rope_scaling", "contradicts rope_parameters")
    rope = new if new.data else old
    _check_same(config, "rope_theta", rope)
    if is_partial:
        _check_same(config, "partial_rotary_factor", rope)
        share = rope.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1))
        head_size = _rotated(rope, share, head_size)
    else:
        _check_whole(config, rope)
    one = _rope(config, rope, config.positive("rope_theta"), max_positions, outer_wins=True)
    if one.factors and 2 * len(one.factors) != head_size:
        key = "rope_parameters" if new.data else "rope_scaling"
        raise config.refusal(key, f"has not one factor for each 2 of {head_size} values")
    one = replace(one, rotated=head_size) if is_partial else one
    return one, one


def read_magnified_rope(
    config: Reader, max_positions: int, head_size: int
) -> tuple[RopeConfig, RopeConfig]:
    """Read `read_rope`, whose longrope, or su, may say what multiplies cosines and sines.

    That is `short_mscale` in the original context, and `long_mscale` in longer ones.
    """
    scaling = config.child("rope_scaling")
    kept = {key: value for key, value in scaling.data.items() if key not in _MAGNITUDES}
    if kept.get("type") == "su":  # what the first files call it
        kept |= {"type": "longrope"}
    config.data = {**config.data, "rope_scaling": kept or None}
    one, _ = read_rope(config, max_positions, head_size)
    said = [key for key in _MAGNITUDES if scaling.has(key)]
    if said and one.kind != "longrope":
        raise scaling.refusal(said[0], f"is not implemented for {one.kind} rotary embedding")
    short, long = (scaling.positive(key, one.attention_factor) for key in _MAGNITUDES)
    one = replace(one, attention_factor=long, short_attention_factor=short)
    return one, one


def read_partial_rope(
    config: Reader, max_positions: int, head_size: int
) -> tuple[RopeConfig, RopeConfig]:
    """Read `read_rope` with a share of heads that rotates."""
    return read_rope(config, max_positions, head_size, is_partial=True)


def _rotated(rope: Reader, share: float, head_size: int) -> int:
    """Return how many numbers of a head rotate; refuse what is no even number of them."""
    rotated = int(head_size * share)
    if share > 1 or rotated % 2 or rotated == 0:
        raise rope.refusal("partial_rotary_factor", f"rotates {rotated} of heads of {head_size}")
    return rotated


def _check_whole(*readers: Reader) -> None:
    """Refuse a share of heads that rotates: a family that has it reads it."""
    for reader in readers:
        if reader.positive("partial_rotary_factor", 1.0) != 1.0:
            raise reader.refusal("partial_rotary_factor", "is not implemented; only 1.0 is")


def read_ropes(config: Reader, max_positions: int, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Read an embedding for full attention and one for windows, each with its theta (Gemma 3).

    `rope_parameters` has an object for each, or (before transformers 5) `rope_theta` and
    `rope_scaling` are for the first, `rope_local_base_freq` for the second. As in transformers, an
    `original_max_position_embeddings` beside them changes nothing.
    """
    both = config.child("rope_parameters")
    if both.data and config.has("rope_scaling"):
        raise config.refusal("rope_scaling", "contradicts rope_parameters")
    for key in both.data.keys() - set(_KINDS_OF_LAYERS):
        raise both.refusal(key, f"is none of {', '.join(_KINDS_OF_LAYERS)}")
    if config.has(_ORIGINAL):
        config.ignore(_ORIGINAL)
    full, local = (both.child(kind) for kind in _KINDS_OF_LAYERS)
    if not both.data:
        full = config.child("rope_scaling")
    _check_same(config, "rope_theta", full)
    _check_same(config, "rope_local_base_freq", local, "rope_theta")
    _check_whole(config, full, local)
    theta, local_theta = (
        config.positive("rope_theta"),
        config.positive("rope_local_base_freq"),
    )
    return (
        _rope(config, full, theta, max_positions, outer_wins=False),
        _rope(config, local, local_theta, max_positions, outer_wins=False),
    )


def _check_same(config: Reader, key: str, rope: Reader, name: str = "") -> None:
    """Refuse a value that differs between rope parameters, under `name`, and the key beside."""
    inner, outer = rope.data.get(name or key), config.data.get(key)
    if inner is not None and outer is not None and inner != outer:
        own = config.names.get(key, key)
        raise rope.refusal(name or key, f"contradicts {own} = {clip(outer)}")


def _rope(
    config: Reader, rope: Reader, theta: float, max_positions: int, outer_wins: bool
) -> RopeConfig:
    """Read the parameters in `rope`; `theta` and `max_positions` are defaults.

    `outer_wins`: whether the context before scaling in `config` wins over that in `rope`.
    """
    kind = _kind(rope)
    for key, value in rope.data.items():
        if key in _ROPE_COMMON | _ROPE_KEYS[kind] or value is None:
            continue
        if key in _OTHER_KEYS or key in _KINDS_OF_LAYERS:
            raise rope.refusal(key, f"is not implemented for {kind} rotary embedding")
        rope.ignore(key)
    theta = rope.positive("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = rope.whole(_ORIGINAL, max_positions, INT32_MAX)
    if outer_wins:
        original = config.whole(_ORIGINAL, original, INT32_MAX)
    if kind == "longrope":
        return _longrope(rope, theta, original, max_positions)
    factor = rope.positive("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "dynamic":  # the same as default up to `max_positions`, where sequences end
        return RopeConfig(theta=theta)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            raise rope.refusal("low_freq_factor", f"is not below high_freq_factor = {high}")
        return RopeConfig(kind, theta, factor, original, low, high)
    if theta <= 1:
        raise config.refusal("rope_theta", f"gives theta = {theta}: yarn needs more than 1")
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", default=True),
    )


def _longrope(rope: Reader, theta: float, original: int, max_positions: int) -> RopeConfig:
    """Read factors for the pairs of a head: of contexts up to `original` tokens, and of longer."""
    short, long = (_factors(rope, key) for key in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise rope.refusal("short_factor", f"has not {len(long)} numbers, as long_factor")
    factor = rope.positive("factor", max_positions / original)
    if not rope.has("attention_factor") and factor > 1 and original == 1:
        raise rope.refusal(_ORIGINAL, f"gives no attention_factor for factor = {factor:g}")
    magnitude = 1 + math.log(factor) / math.log(original) if factor > 1 and original > 1 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        original_max_positions=original,
        attention_factor=rope.positive("attention_factor", math.sqrt(magnitude)),
        factors=long,
        short_factors=() if short == long else short,
    )


def _factors(rope: Reader, key: str) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list) or not factors or not all(map(_is_positive, factors)):
        raise rope.refusal(key, "is not a list of numbers > 0")
    return tuple(map(float, factors))


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < float(str(value)) < math.inf


def _kind(rope: Reader) -> str:
    """Return `rope_type`, or `type` as older files call it; refuse two that differ."""
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.data.get(key)
    if key == "rope_type" and rope.has("type") and rope.data["type"] != kind:
        raise rope.refusal("type", f"contradicts rope_type = {clip(kind)}")
    if kind is None:
        return "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise rope.refusal(key, f"is not implemented; one of {', '.join(_ROPE_KEYS)} is")
    return kind


def _yarn_attention_factor(rope: Reader, factor: float) -> float:
    """Return yarn's factor of cos and sin: as given, or its paper's `0.1 ln(factor) + 1`."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("attention_factor"):
        return rope.positive("attention_factor")
    if rope.data.get("mscale") and rope.data.get("mscale_all_dim"):
        return magnitude(rope.positive("mscale")) / magnitude(rope.positive("mscale_all_dim"))
    return magnitude(1.0)
