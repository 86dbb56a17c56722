"""Checks of the scheme of weights against a model and a device, before weights are read."""

from pathlib import Path

import torch

from slipstream import quant
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.experts.kind import DTYPES, MULTIPLE
from slipstream.models.cache_scheme import quantization_of
from slipstream.models.model_config import ModelConfig


def check_scheme(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `ConfigError` if the scheme cannot have the device, the dtype or the matrices."""
    found = None if config.load_format == "random" else quantization_of(Path(config.checkpoint))
    if found is not None and config.quantization not in ("auto", "none"):
        why = f"but the weights are quantised already ({found[0]}): auto and none serve them"
        raise ConfigError(f"quantization = {config.quantization!r}, {why}")
    d, experts, latent = model.dims, model.axes.experts, model.axes.latent
    inputs = {"hidden_size": d.hidden_size, "intermediate_size": d.intermediate_size}
    if latent is None:
        inputs["num_attention_heads * head_dim"] = d.num_heads * d.head_size
    else:  # what makes keys and values of latents keeps the dtype
        inputs["num_attention_heads * v_head_dim"] = d.num_heads * latent.value
        inputs |= {"q_lora_rank": latent.query_rank} if latent.query_rank else {}
    if experts is not None and len(model.axes.dense_layers) < d.num_layers:
        inputs["the inner size of experts"] = experts.inner_size
        _check_experts(inputs, device, dtype)
    quant.named(config.quantization).check(inputs, device, dtype)


def _check_experts(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if a mixture of experts cannot have the device, dtype or sizes.

    `sizes` are inputs of matrices by what config.json calls them.
    """
    if device.type == "cpu":
        return
    if dtype not in DTYPES:
        raise ConfigError(
            f"a mixture of experts on a GPU needs dtype float16 or bfloat16, not {dtype}"
        )
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise ConfigError(
                f"a mixture of experts on a GPU needs sizes that are multiples of {MULTIPLE}: "
                f"config.json has {name} = {size}"
            )
