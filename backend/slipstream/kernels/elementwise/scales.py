"""Scales of a GEMM's rows and columns, and its bias: a quantised product still needs them.

Its reader applies them: a kernel that reads the product for something else anyway, or `scale` of
`eight_bits.py`.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.runtime import tape


class Scales(NamedTuple):
    """Scales and bias that a product of `n` rows and `m` columns still needs."""

    rows: Tensor  # [n] f32
    columns: Tensor  # [m] f32
    bias: Tensor | None  # [m], added after


def ones(count: int, device: torch.device) -> Tensor:
    """Return f32 scales `[count]` that change nothing; they stay in memory, and nobody writes."""
    return _ones(1 << (count - 1).bit_length(), device)[:count]


@functools.cache
def _ones(count: int, device: torch.device) -> Tensor:
    return tape.lasts(torch.ones(count, dtype=torch.float32, device=device))


def scaled(product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """Scale a product of `n` rows and `m` columns: `[n, m]` f32."""
    values = product.float() * columns * rows[:, None]  # so ordered, large rows do not overflow
    return values if bias is None else values + bias.float()
