"""The rotary embedding that a `config.json` asks for. No torch."""

import math

from slipstream_contract.errors import clip

from slipstream.layers.dims import RopeConfig
from slipstream.models.reader import Reader, words

_ROPE_KEYS = {
    "default": words(""),
    "linear": words("factor"),
    "llama3": words("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": words(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate finetuned"
    ),
}
_ROPE_COMMON = words("type rope_type rope_theta partial_rotary_factor")
# Read by some kind of rotary embedding, here or in transformers: they ask for it.
_OTHER_KEYS = words("short_factor long_factor alpha mrope_section").union(*_ROPE_KEYS.values())

_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


def read_rope(config: Reader, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """One for all layers, twice: `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    new, old = config.child("rope_parameters"), config.child("rope_scaling")
    if new.data and old.data and new.data != old.data:
        raise config.refusal("rope_scaling", "contradicts rope_parameters")
    rope = new if new.data else old
    _check_theta(config, "rope_theta", rope)
    one = _rope(config, rope, config.positive("rope_theta"), max_positions)
    return one, one


def read_ropes(config: Reader, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything and of those with a window, each with its own theta (Gemma 3).

    In `rope_parameters`, an object for each of the two, or (before transformers 5) `rope_theta` and
    `rope_scaling` for the first, `rope_local_base_freq` for the second.
    """
    both = config.child("rope_parameters")
    if both.data and config.has("rope_scaling"):
        raise config.refusal("rope_scaling", "contradicts rope_parameters")
    for key in both.data.keys() - set(_KINDS_OF_LAYERS):
        raise both.refusal(key, f"is none of {', '.join(_KINDS_OF_LAYERS)}")
    wide, local = (both.child(kind) for kind in _KINDS_OF_LAYERS)
    if not both.data:
        wide = config.child("rope_scaling")
    _check_theta(config, "rope_theta", wide)
    _check_theta(config, "rope_local_base_freq", local)
    theta, local_theta = (
        config.positive("rope_theta"),
        config.positive("rope_local_base_freq"),
    )
    return (
        _rope(config, wide, theta, max_positions),
        _rope(config, local, local_theta, max_positions),
    )


def _check_theta(config: Reader, key: str, rope: Reader) -> None:
    """Refuse two that differ."""
    theta, outer = rope.data.get("rope_theta"), config.data.get(key)
    if theta is not None and outer is not None and theta != outer:
        raise rope.refusal("rope_theta", f"contradicts {key} = {outer}")


def _rope(config: Reader, rope: Reader, theta: float, max_positions: int) -> RopeConfig:
    """What `rope` says; where it is silent on theta, `theta`."""
    kind = _kind(rope)
    for reader in (config, rope):
        if reader.positive("partial_rotary_factor", 1.0) != 1.0:
            raise reader.refusal("partial_rotary_factor", "is not implemented; only 1.0 is")
    for key, value in rope.data.items():
        if key in _ROPE_COMMON | _ROPE_KEYS[kind] or value is None:
            continue
        if key in _OTHER_KEYS or key in _KINDS_OF_LAYERS:
            raise rope.refusal(key, f"is not implemented for {kind} rotary embedding")
        rope.ignore(key)
    theta = rope.positive("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.positive("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    inner = rope.whole("original_max_position_embeddings", max_positions)
    original = config.whole("original_max_position_embeddings", inner)
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


def _kind(rope: Reader) -> str:
    """`rope_type`, or `type` as it was called before; where both are there, they must agree."""
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
    """How much yarn sharpens attention: as given, or its paper's `0.1 ln(factor) + 1`."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("attention_factor"):
        return rope.positive("attention_factor")
    if rope.data.get("mscale") and rope.data.get("mscale_all_dim"):
        return magnitude(rope.positive("mscale")) / magnitude(rope.positive("mscale_all_dim"))
    return magnitude(1.0)
