"""EXAONE 4 (LG AI Research, 2025): norms behind alone; layers without a window do not rotate."""

from slipstream.models.axes import Axes, QkNorms, TensorNames
from slipstream.models.families.olmo2 import NAMES
from slipstream.models.family import family
from slipstream.models.reader import Reader
from slipstream.models.windows import read_windows


def still(config: Reader, num_layers: int) -> frozenset[int]:
    """Return the layers without a window, if any layer may have one."""
    if not config.has("sliding_window"):
        return frozenset()
    windows = read_windows(config, num_layers)
    return frozenset(i for i, window in enumerate(windows) if not window)


@family(
    "Exaone4ForCausalLM",
    keys="sliding_window_pattern",
    still=still,
    tensors=TensorNames(NAMES),
)
def exaone4(config: Reader) -> Axes:
    """Return the axes: queries and keys of each head are normalised."""
    return Axes(norms_before=False, norms_behind=True, qk_norms=QkNorms.HEADS)
