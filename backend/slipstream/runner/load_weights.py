"""The weights that a plan asks for."""

import logging

from slipstream.kernels.cpu.native import library
from slipstream.models.fileless import RandomSource
from slipstream.models.files import tensor_entries
from slipstream.models.packed_store import PackedStore, path_of
from slipstream.models.source import Source, Weights
from slipstream.models.weights import FileSource
from slipstream.runner.host import MIN_ELEMENTS
from slipstream.runner.plan import Plan

_log = logging.getLogger(__name__)
# Schemes whose packing takes longer than to read its result.
_MADE_AT_LOAD = ("int4", "int8", "w8a8")


def load_weights(plan: Plan) -> Weights:
    """Open the checkpoint of a plan, or draw its weights. Raises `CheckpointError`."""
    config = plan.config
    if config.load_format == "random":
        drawn: Source = RandomSource(plan.device, cuts=plan.model.tensors.cuts)
        return Weights(drawn, plan.device, plan.dtype, config.quantization, config.deterministic)
    source = FileSource(plan.checkpoint, plan.device, plan.model.tensors)
    settings = (plan.device, plan.dtype, config.quantization, config.deterministic)
    return Weights(source, *settings, store=_store(plan))


def _store(plan: Plan) -> PackedStore | None:
    """Return where packed weights are kept; None: packing is cheap, or a rank's own."""
    is_made = plan.config.quantization in _MADE_AT_LOAD and plan.device.type == "cpu"
    is_whole = plan.config.num_ranks == 1 and plan.model.build is None
    if not is_made or not is_whole or plan.block_elements < MIN_ELEMENTS or library() is None:
        return None
    files = {entry.file for entry in tensor_entries(plan.checkpoint).values()}
    try:
        described = [path for path in plan.checkpoint.glob("*.json") if path.is_file()]
        path = path_of({*files, *described}, (plan.config.quantization, str(plan.dtype)))
    except OSError as error:
        _log.info("packed weights are not kept: %s", error)
        return None
    return PackedStore(path)
