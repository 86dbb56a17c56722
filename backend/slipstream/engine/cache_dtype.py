"""The dtype of the KV cache, as `kv_cache_dtype` asks for it."""

import torch

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels import kv_format
from slipstream.models.hf import ModelConfig


def cache_dtype(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Of a layer's cache (kernels/kv_format.py); auto: that of the activations.

    Raises `ConfigError` for a format that this model or block size cannot have.
    """
    name, head_size = config.kv_cache_dtype, model.dims.head_size
    if name == "auto":
        return dtype
    asked = f"kv_cache_dtype = {name[:64]!r}"
    if name not in kv_format.FORMATS:
        raise ConfigError(f"{asked} is not one of auto, {', '.join(kv_format.FORMATS)}")
    smallest = kv_format.MIN_BLOCK_SIZE
    if config.block_size < smallest:
        raise ConfigError(f"{asked} needs block_size >= {smallest}, not {config.block_size}")
    if not kv_format.is_legal(kv_format.FORMATS[name], head_size):
        raise ConfigError(
            f"{asked} needs heads that are equal groups of at most {kv_format.GROUP} numbers, "
            f"and even: config.json has head_dim = {head_size}"
        )
    return kv_format.FORMATS[name]
