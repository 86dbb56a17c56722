"""Scales of a layer's cache that come with a checkpoint, found by calibration."""

from collections.abc import Iterable

from slipstream.kernels.cache.kv_format import Static
from slipstream.layers.source import WeightSource

# Beside an attention's matrices. Of llm-compressor; of vLLM; of ModelOpt; of compressed-tensors
# before it had the first.
_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")
_BOTH = "kv_scale"  # of AutoFP8


def are_among(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has scales of a cache."""
    return any(name.endswith((*_KEYS, *_VALUES, _BOTH)) for name in names)


def static_scales(w: WeightSource) -> Static | None:
    """Read the scales of the attention layer below `w`; None if the checkpoint has none.

    Raises `CheckpointError` for one that is missing beside the other, or is no scale.
    """
    key, value = (next((name for name in names if w.has(name)), None) for names in (_KEYS, _VALUES))
    if key or value:
        return Static(w.number(key or _KEYS[0]), w.number(value or _VALUES[0]))
    if w.has(_BOTH):
        return Static(w.number(_BOTH), w.number(_BOTH))
    return None
