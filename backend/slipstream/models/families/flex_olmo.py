"""FlexOlmo (Shi et al., 2025): OLMo 2's norms, OLMoE's experts."""

from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.experts import KEYS
from slipstream.models.families.olmo2 import NAMES
from slipstream.models.families.olmoe import olmoe
from slipstream.models.family import family
from slipstream.models.reader import Reader


@family(
    "FlexOlmoForCausalLM",
    keys=f"attention_bias {KEYS} norm_topk_prob",
    has_windows=False,
    tensors=TensorNames(NAMES),
)
def flex_olmo(config: Reader) -> Axes:
    """Read the experts, and whether attention has biases."""
    return replace(olmoe(config), norms_before=False, norms_behind=True)
