"""The attention spec of a configuration, and the dtype of the KV cache."""

import logging
from pathlib import Path

import torch

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.attention.backend import backend_for
from slipstream.kernels.attention.spec import CAUSAL, LATENT, PREFIX, AttentionSpec
from slipstream.kernels.cache import kv_format
from slipstream.kernels.runtime import jit
from slipstream.layers.attention import Attention
from slipstream.layers.cache_scales import are_among
from slipstream.layers.decoder import Decoder, StepDecoder
from slipstream.models.files import tensor_entries
from slipstream.models.model_config import ModelConfig
from slipstream.models.padding import with_heads_of

_log = logging.getLogger(__name__)


def cache_dtype(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype of a layer's cache (kernels/cache/kv_format.py).

    auto: fp8 where the checkpoint says so, has scales for it, and attention supports it beside the
    rest of the configuration; else `dtype`, that of the activations. Raises `ConfigError` for a
    name that is no format's.
    """
    name = config.kv_cache_dtype
    if name != "auto":
        if name not in kv_format.FORMATS:
            formats = ", ".join(kv_format.FORMATS)
            raise ConfigError(f"kv_cache_dtype = {name[:64]!r} is not one of auto, {formats}")
        return kv_format.FORMATS[name]
    fp8 = torch.float8_e4m3fn
    if model.fp8_cache and _has_scales(config):
        spec = attention_spec(config, model, device, dtype, fp8)
        if not isinstance(backend_for(spec), str):
            return fp8
    return dtype


def attention_spec(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    cached: torch.dtype,
    layers_per_block: int = 1,
) -> AttentionSpec:
    """Return what this configuration of the model asks of attention, with such a cache."""
    d = model.dims
    return AttentionSpec(
        device=device.type,
        dtype=dtype,
        cache_dtype=cached,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_size=d.head_size,
        block_size=config.block_size,
        windows=tuple(sorted(set(model.windows))),
        is_chunked=model.axes.chunked,
        stream_window=config.attention_window or 0,
        num_sinks=config.sink_tokens,
        deterministic=config.deterministic,
        reuses_blocks=config.kv_cache_reuse and model.axes.two_way is None,
        host_bytes=config.kv_cache_host_bytes,
        layers_per_block=layers_per_block,
        form=LATENT if model.axes.latent else PREFIX if model.axes.two_way else CAUSAL,
        latent_rank=model.axes.latent.rank if model.axes.latent else 0,
        has_sink_scores=model.axes.sink_scores,
        score_cap=model.axes.score_cap,
        has_slopes=bool(model.axes.slopes),
        skipped_tokens=_skipped_tokens(config, model),
        model=model.architecture,
    )


def _skipped_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens of blocks that heads skip; 0: sequences end before they would skip one."""
    skips, longest = model.axes.skips, config.max_model_len or model.max_positions
    if skips is None:
        return 0
    is_dense = longest <= skips.dense_tokens and config.attention_window is None
    return 0 if is_dense else skips.tokens


def model_on(device: str, model: ModelConfig) -> ModelConfig:
    """Return the model with heads that the device's kernels have; a CPU takes any.

    Latents are no heads, and stay as they are.
    """
    return model if device == "cpu" or model.axes.latent else with_heads_of(model, jit.HEAD_SIZES)


def check_positions(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if sequences have no end, but the model's positions do."""
    asked = f"attention_window = {config.attention_window}"
    if config.attention_window is None or any(model.windows):  # the backend refuses these
        return
    if model.axes.learned_positions:
        raise ConfigError(f"{asked}: {model.architecture} has a table of positions, which ends")
    if len(set(model.ropes)) > 1:
        raise ConfigError(f"{asked}: layers of {model.architecture} rotate in several ways")
    if model.axes.late_norms:
        raise ConfigError(f"{asked}: {model.architecture} normalises rotated queries and keys")
    if model.axes.query_growth is not None:
        raise ConfigError(f"{asked}: queries of {model.architecture} grow with their position")
    if model.rope.short_factors:
        raise ConfigError(f"{asked}: config.json has factors of rotation for a length (longrope)")


def note_positions(model: ModelConfig, max_model_len: int) -> None:
    """Log by which of two lists of factors all sequences rotate, where there are two."""
    for rope in dict.fromkeys(model.ropes):
        if rope.short_factors:
            original = rope.original_max_positions
            is_short = max_model_len <= original
            _log.info(
                "longrope: all sequences rotate by %s, as max_model_len = %d is %s the original "
                "context of %d",
                "short_factor" if is_short else "long_factor",
                max_model_len,
                "within" if is_short else "above",
                original,
            )


def _has_scales(config: EngineConfig) -> bool:
    is_read = config.load_format == "safetensors"
    return is_read and are_among(tensor_entries(Path(config.checkpoint)))


def log_scales(dtype: torch.dtype, decoder: StepDecoder) -> None:
    """Say what becomes of scales that a checkpoint has for its cache."""
    if not isinstance(decoder, Decoder):
        return
    layers = [block.attention for block in decoder.blocks]
    count = sum(isinstance(layer, Attention) and layer.static is not None for layer in layers)
    if count == 0:
        return
    if dtype == torch.float8_e4m3fn:
        _log.info("KV cache in the checkpoint's scales, of %d of %d layers", count, len(layers))
        return
    name = kv_format.name_of(dtype)
    _log.info("the checkpoint's scales of an fp8 KV cache are not used: the cache is %s", name)
