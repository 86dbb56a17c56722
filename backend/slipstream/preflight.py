"""Check, for `slipstream compose`, what the engine checks at start before it reads weights."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.core.processors import load_processors
from slipstream.errors import ConfigError
from slipstream.models.files import tensor_entries
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.hf import CheckpointInfo, describe


@dataclass(frozen=True, slots=True)
class Preflight:
    """A checkpoint and settings that the engine accepts."""

    info: CheckpointInfo
    notes: list[str]  # lines for the operator


def preflight(config: EngineConfig) -> Preflight:
    """Check settings, configuration, adapters, and names, shapes and dtypes of all tensors.

    Imports torch.

    Memory is not checked: another machine may serve. Without a GPU, a note says what a GPU would
    refuse. Raises `ConfigError` (field, value, limit) or `CheckpointError` (file, key or tensor,
    value).
    """
    import torch

    from slipstream.models.backends import notes as serving_notes
    from slipstream.models.check import check_tensors
    from slipstream.runner.adapter_check import check_adapters
    from slipstream.runner.plan import settle, settle_here

    load_processors(config.logits_processors)
    plan = settle_here(config)
    check_tensors(Path(config.checkpoint), plan.model)
    check_adapters(plan)
    info = describe(config.checkpoint, plan.model)
    notes = [line for line in (info.ignored, serving_notes(plan.model), _again(config)) if line]
    if plan.device.type == "cpu" and config.device == "auto":
        try:
            settle(config, torch.device("cuda", 0))
        except ConfigError as error:
            notes.append(f"not on a GPU: {error}")
    return Preflight(info, notes)


def _again(config: EngineConfig) -> str:
    """Return a line if the weights of a GGUF file are rounded a second time; else nothing."""
    if config.quantization in ("auto", "none"):
        return ""
    entries = tensor_entries(Path(config.checkpoint))
    found = {
        entry.dtype for name, entry in entries.items() if any(map(str.isdigit, name.split(".")))
    }
    kinds = ", ".join(sorted(found & QUANTISED.keys()))
    return kinds and (
        f"the file's weights are quantised already ({kinds}): quantization = "
        f"{config.quantization!r} rounds them once more, auto does not"
    )
