"""HyperCLOVA X SEED Think (NAVER, 2025): Granite with norms on both sides, logits multiplied."""

from dataclasses import replace

from slipstream.models.axes import Axes, TensorNames
from slipstream.models.families.granite import KEYS, granite
from slipstream.models.family import family
from slipstream.models.reader import Reader

NAMES = {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}


@family(
    "HyperCLOVAXForCausalLM",
    keys=f"{KEYS} mlp_bias use_post_norm",
    has_windows=False,
    tensors=TensorNames(NAMES),
)
def hyperclovax(config: Reader) -> Axes:
    """Read biases, factors and whether norms stand behind attention and MLP, too."""
    key = "attention_multiplier"
    return replace(
        granite(config),
        norms_behind=config.flag("use_post_norm", default=True),
        attention_scale=config.positive(key) if config.has(key) else None,
        logit_scale=config.positive("logits_scaling", 1.0),
    )
