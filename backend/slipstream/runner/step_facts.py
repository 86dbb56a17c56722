"""What the times of a plan's steps depend on, beside the host."""

import torch

from slipstream.models.files import tensor_entries
from slipstream.models.model_config import ModelConfig
from slipstream.runner.plan import Plan


def facts_of_step(plan: Plan, model: ModelConfig) -> dict[str, object]:
    """Return the shape of a model, the bytes of its weights, and settings that choose kernels."""
    entries = {} if plan.config.load_format == "random" else tensor_entries(plan.checkpoint)
    found: dict[str, object] = {
        "model": model.dims,
        "architecture": model.architecture,
        "bytes": sum(entry.end - entry.begin for entry in entries.values()),
        "dtype": plan.dtype,
        "quantization": plan.config.quantization,
        "deterministic": plan.config.deterministic,
        "cache": plan.cache_dtype,
    }
    if plan.device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(plan.device)
    return found
