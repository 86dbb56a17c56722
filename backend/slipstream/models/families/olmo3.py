"""OLMo 3 (OLMo Team, 2025): OLMo 2 with windows in three of four layers, which rotate plainly."""

from collections.abc import Mapping

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.families.olmo2 import NAMES, olmo2
from slipstream.models.family import family
from slipstream.models.gguf_form import GgufForm, GgufKeys, windows_of
from slipstream.models.reader import Reader
from slipstream.models.ropes import read_ropes

_EVERY = 4  # so many layers, one has full attention


def derived(config: Reader) -> Mapping[str, object]:
    """Return which layers have a window where config.json does not say, and their theta."""
    local = config.child("rope_parameters").child("sliding_attention")
    theta = local.positive("rope_theta", config.positive("rope_theta"))
    found: dict[str, object] = {"rope_local_base_freq": theta}
    if not config.has("layer_types"):
        found["sliding_window_pattern"] = _EVERY
    return found


def gguf_config(keys: GgufKeys) -> dict[str, object]:
    """Return the window of a GGUF file, which calls a model without one an OLMo 2."""
    return {"sliding_window": keys.whole("attention.sliding_window"), **windows_of(keys, _EVERY)}


@family(
    "Olmo3ForCausalLM",
    keys="attention_bias",
    read_ropes=read_ropes,
    derived=derived,
    tensors=TensorNames(NAMES),
    gguf=GgufForm("olmo2", flags={"attention_bias": "attn_q.bias"}, config=gguf_config),
)
def olmo3(config: Reader) -> Axes:
    """Read whether all attention matrices have biases."""
    return olmo2(config)
