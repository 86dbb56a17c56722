"""The dtype of the KV cache, as `kv_cache_dtype` asks for it."""

import logging
from pathlib import Path

import torch

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cache import kv_format
from slipstream.layers.attention import Attention
from slipstream.layers.cache_scales import are_among
from slipstream.layers.decoder import Decoder
from slipstream.models.files import tensor_entries
from slipstream.models.model_config import ModelConfig

_log = logging.getLogger(__name__)


def cache_dtype(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """Of a layer's cache (kernels/cache/kv_format.py).

    auto: fp8 where the checkpoint says so, has scales for it, and nothing else that is asked for
    needs a cache of 16 bits; else `dtype`, that of the activations. Raises `ConfigError` for a
    format that this model or block size cannot have.
    """
    name, head_size = config.kv_cache_dtype, model.dims.head_size
    smallest = kv_format.MIN_BLOCK_SIZE
    if name == "auto":
        streams = config.attention_window is not None and device.type != "cpu"
        can_be_fp8 = config.block_size >= smallest and not streams
        is_fp8 = model.fp8_cache and can_be_fp8 and _has_scales(config)
        return torch.float8_e4m3fn if is_fp8 else dtype
    asked = f"kv_cache_dtype = {name[:64]!r}"
    if name not in kv_format.FORMATS:
        raise ConfigError(f"{asked} is not one of auto, {', '.join(kv_format.FORMATS)}")
    if config.block_size < smallest:
        raise ConfigError(f"{asked} needs block_size >= {smallest}, not {config.block_size}")
    if not kv_format.is_legal(kv_format.FORMATS[name], head_size):
        raise ConfigError(
            f"{asked} needs heads that are equal groups of at most {kv_format.GROUP} numbers, "
            f"and even: config.json has head_dim = {head_size}"
        )
    return kv_format.FORMATS[name]


def _has_scales(config: EngineConfig) -> bool:
    is_read = config.load_format == "safetensors"
    return is_read and are_among(tensor_entries(Path(config.checkpoint)))


def log_scales(dtype: torch.dtype, decoder: Decoder) -> None:
    """Say what becomes of scales that a checkpoint has for its cache."""
    layers = [block.attention for block in decoder.blocks]
    count = sum(isinstance(layer, Attention) and layer.static is not None for layer in layers)
    if count == 0:
        return
    if dtype == torch.float8_e4m3fn:
        _log.info("KV cache in the checkpoint's scales, of %d of %d layers", count, len(layers))
        return
    name = kv_format.name_of(dtype)
    _log.info("the checkpoint's scales of an fp8 KV cache are not used: the cache is %s", name)
