"""The weights that a plan asks for."""

from slipstream.models.fileless import RandomSource
from slipstream.models.source import Source, Weights
from slipstream.models.weights import FileSource
from slipstream.runner.plan import Plan


def load_weights(plan: Plan) -> Weights:
    """Open the checkpoint of a plan, or draw its weights. Raises `CheckpointError`."""
    config = plan.config
    source: Source = RandomSource(plan.device, cuts=plan.model.tensors.cuts)
    if config.load_format != "random":
        source = FileSource(plan.checkpoint, plan.device, plan.model.tensors)
    return Weights(source, plan.device, plan.dtype, config.quantization, config.deterministic)
