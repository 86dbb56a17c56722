"""Cosines and sines of every position, once at start, for each way of stretching the context."""

import math

import torch
from torch import Tensor

from slipstream.layers.dims import RopeConfig


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Stretch long waves by the factor, keep short ones, blend those between."""
    turns = config.original_max_positions * frequencies / (2 * math.pi)  # in the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / config.factor * (1 - kept)


def _yarn(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Stretch as llama3, but with a blend that is linear in the dimension's number."""
    half = len(frequencies)

    def dimension(turns: float) -> float:
        """Return the (real) dimension that turns so often in the original context."""
        wavelength = config.original_max_positions / (turns * 2 * math.pi)
        return half * math.log(wavelength) / math.log(config.theta)

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if last != first else 1e-3
    stretched = ((torch.arange(half, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / config.factor * stretched


def frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """Radians a position for each of `head_size / 2` pairs, fp32; 0 for those that stay."""
    rotated = head_size if config.rotated is None else config.rotated
    turning = _frequencies(config, rotated) if rotated else torch.zeros(0, dtype=torch.float32)
    if config.has_two:
        turning = _frequencies(config, rotated // 2).repeat(2)
    still = torch.zeros((head_size - rotated) // 2, dtype=torch.float32)
    return torch.cat((turning, still))


def magnitudes(config: RopeConfig, head_size: int) -> Tensor:
    """Factors of cosines and then sines, `[head_size]` fp32: 1 for those of pairs that stay."""
    turn = frequencies(config, head_size) != 0
    return torch.where(torch.cat((turn, turn)), config.attention_factor, 1.0)


def _frequencies(config: RopeConfig, head_size: int) -> Tensor:
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    plain = 1.0 / config.theta**exponents
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(plain, config)
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.factors, dtype=torch.float32) * config.theta**exponents)
    assert config.kind == "yarn", config.kind
    return _yarn(plain, config)


def cos_sin_table(
    config: RopeConfig, head_size: int, num_positions: int, device: torch.device
) -> Tensor:
    """`[num_positions, head_size]` fp32: half cosines, half sines.

    Angles are computed in fp32, as checkpoints were trained with.
    """
    config = config.of_length(num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(config, head_size))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitudes(config, head_size)
    return table.to(device)


def growth_table(
    share: float, every: int, first: int, num_positions: int, device: torch.device
) -> Tensor:
    """`[num_positions]` fp32: `1 + share log(1 + (p + first) // every)` of position p."""
    steps = (torch.arange(num_positions) + first) // every
    return (1 + share * torch.log1p(steps.float())).to(device)


def cos_sin_at(frequencies: Tensor, positions: Tensor) -> Tensor:
    """`[n, head_size]` fp32 as `cos_sin_table`, of any positions `[n]`, by fp64 angles."""
    angles = torch.outer(positions.double(), frequencies.double())
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()
