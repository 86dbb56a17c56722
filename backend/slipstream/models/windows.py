"""Read from a `config.json` which layers have a sliding window, and its size. No torch."""

from slipstream.models.reader import Reader

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(config: Reader, num_layers: int) -> tuple[int, ...]:
    """Return for each layer how many tokens a query sees, with its own; 0: full attention.

    `layer_types` decides; without it `sliding_window_pattern` (Gemma: every n-th layer has full
    attention) or `max_window_layers` (Qwen: layers below it have); else all have the window.
    """
    window = 0
    if config.has("sliding_window") and config.flag("use_sliding_window", default=True):
        window = config.whole("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if _slides(config, i) else 0 for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refusal("layer_types", f"is not a list of {num_layers} kinds")
    if not all(kind in (_FULL, _SLIDING) for kind in kinds):
        raise config.refusal("layer_types", f"has kinds other than {_FULL} and {_SLIDING}")
    if _SLIDING in kinds and not window:
        raise config.refusal("layer_types", f"has {_SLIDING}, but no sliding_window is in use")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _slides(config: Reader, layer: int) -> bool:
    if config.has("sliding_window_pattern"):
        return (layer + 1) % config.whole("sliding_window_pattern") > 0
    first = config.get("max_window_layers")
    if first is None:
        return True
    if type(first) is not int or first < 0:
        raise config.refusal("max_window_layers", "is not a whole number >= 0")
    return layer >= first
