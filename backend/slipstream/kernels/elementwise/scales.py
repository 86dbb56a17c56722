"""Scales of a GEMM's rows and columns, and its bias: a quantised product still needs them.

Its reader applies them: a kernel that reads the product for something else anyway, or `fp8.scale`.
"""

from typing import NamedTuple

from torch import Tensor


class Scales(NamedTuple):
    """Scales and bias that a product of `n` rows and `m` columns still needs."""

    rows: Tensor  # [n] f32
    columns: Tensor  # [m] f32
    bias: Tensor | None  # [m], added after


def scaled(product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """Scale a product of `n` rows and `m` columns: `[n, m]` f32."""
    values = product.float() * columns * rows[:, None]  # so ordered, large rows do not overflow
    return values if bias is None else values + bias.float()
