"""Products whose rows do not depend on each other, bit for bit.

The kernel of a matrix product, and with it the order of a row's sums, hangs on the number of rows.
So here every product has the same number. Whoever makes the inputs of a step fills it up to a
multiple of that.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels.elementwise.fp8 import Quantized, Scales
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual

if TYPE_CHECKING:
    from slipstream.layers.projection import Projection

ROWS = 128


def _slices(num_rows: int) -> list[slice]:
    """One at least: of no rows, one of none."""
    assert num_rows % ROWS == 0, f"{num_rows} rows are no multiple of {ROWS}"
    return [slice(begin, begin + ROWS) for begin in range(0, max(1, num_rows), ROWS)]


def in_slices(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`product` of the rows of `x [n, k]`, a slice at a time."""
    parts = [product(x[part]) for part in _slices(len(x))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Sliced:
    """A projection, applied to slices."""

    def __init__(self, projection: "Projection") -> None:
        self._projection = projection

    def of_norm(self, norm: Norm, residual: Residual) -> tuple[Tensor, Scales | None]:
        """The product with `norm(residual)`, `[n, out]`, and what it is still to be scaled by."""
        x = residual.values
        parts = [self._projection.of_norm(norm, Residual(x[part])) for part in _slices(len(x))]
        if len(parts) == 1:
            return parts[0]
        scales = [scale for _, scale in parts if scale is not None]
        rows = [scale.rows for scale in scales]
        joined = scales[0]._replace(rows=torch.cat(rows)) if scales else None
        return torch.cat([product for product, _ in parts]), joined

    def gate_of_norm(self, norm: Norm, residual: Residual) -> Tensor | Quantized:
        """`silu(gate) * up` of `[gate | up]`, the product with `norm(residual)`; `[n, out / 2]`."""
        x = residual.values
        parts = [self._projection.gate_of_norm(norm, Residual(x[part])) for part in _slices(len(x))]
        if len(parts) == 1:
            return parts[0]
        quantized = [part for part in parts if isinstance(part, Quantized)]
        if quantized:
            values, scales = zip(*quantized, strict=True)
            return Quantized(torch.cat(values), torch.cat(scales))
        return torch.cat([part for part in parts if isinstance(part, Tensor)])

    def add_to(self, residual: Residual, x: Tensor | Quantized) -> None:
        """`residual [n, out] += ` the product with `x [n, in]`."""
        values = residual.values
        for part in _slices(len(values)):
            rows = Residual(values[part])
            inputs = x[part] if isinstance(x, Tensor) else Quantized(x.values[part], x.scales[part])
            self._projection.add_to(rows, inputs)
            _ = rows.values  # what was to be added later is added now
