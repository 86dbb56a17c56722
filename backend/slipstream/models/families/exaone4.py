"""EXAONE 4 (LG AI Research, 2025): norms behind alone; layers without a window do not rotate."""

from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.families.olmo2 import NAMES
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys, windows_of
from slipstream.models.reader import Reader
from slipstream.models.windows import read_windows

_EVERY = 4  # so many layers, one has full attention


def still(config: Reader, num_layers: int) -> frozenset[int]:
    """Return the layers without a window, if any layer may have one."""
    if not config.has("sliding_window"):
        return frozenset()
    windows = read_windows(config, num_layers)
    return frozenset(i for i, window in enumerate(windows) if not window)


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the window of a GGUF file, which small models do not have."""
    if not keys.get("attention.sliding_window"):
        return {"sliding_window": None, "layer_types": ["full_attention"] * keys.num_layers}
    return {"sliding_window": keys.whole("attention.sliding_window"), **windows_of(keys, _EVERY)}


@family(
    "Exaone4ForCausalLM",
    keys="sliding_window_pattern",
    still=still,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("exaone4", config=gguf_config),
)
def exaone4(config: Reader) -> Axes:
    """Return the axes: queries and keys of each head are normalised."""
    return Axes(norms_before=False, norms_behind=True, qk_norms=QkNorms.HEADS)
