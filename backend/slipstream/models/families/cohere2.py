"""Cohere's Command R7B (2024): Command R whose layers without a window do not rotate."""

from slipstream.models.axes import Axes
from slipstream.models.families.cohere import axes
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm
from slipstream.models.reader import Reader
from slipstream.models.windows import read_windows


def still(config: Reader, num_layers: int) -> frozenset[int]:
    """Return the layers without a window."""
    windows = read_windows(config, num_layers)
    return frozenset(i for i, window in enumerate(windows) if not window)


@family(
    "Cohere2ForCausalLM",
    keys="attention_bias logit_scale sliding_window_pattern",
    still=still,
    aliases="rms_norm_eps=layer_norm_eps",
    gguf=GgufForm(
        "cohere2",
        flags={"attention_bias": "attn_q.bias"},
        numbers={"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
        fixed={"sliding_window_pattern": 4},
    ),
)
def cohere2(config: Reader) -> Axes:
    """Read biases of attention, and the factor of logits."""
    return axes(config)
