"""Magnitudes of adapters (DoRA, Liu et al., 2024): each row of a changed matrix has a given length.

A row of `W + b a` is divided by its length. Where ranks share a matrix's inputs, each has the sum
of squares of its own, and the length is the root of all sums together.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.gemm import cpu_packing
from slipstream.layers.linear import Linear

_COLUMNS = 512  # of a matrix that are looked at together
_TILED = (cpu_packing.LAYOUT, cpu_packing.ROWS)


class Kind(NamedTuple):
    """The dtype and device of rows that layers multiply."""

    dtype: torch.dtype
    device: torch.device


def squares(linear: Linear, first: int, a: Tensor, b: Tensor, kind: Kind) -> Tensor:
    """Return the sum of squares of each row of some outputs with `b a` added, `[outputs]` f64.

    The matrix is what the layer multiplies by, dequantised where it is quantised.

    Args:
        linear: the layer.
        first: of the outputs.
        a, b: `[r, inputs]` and `[outputs, r]`, in host memory.
        kind: of the model's rows.
    """
    dtype, where = kind
    count, inputs = len(b), a.shape[1]
    here = slice(first, first + count)
    whole = _dense(linear)
    a, b = a.float().to(where), b.float().to(where)
    total = torch.zeros(count, dtype=torch.float64, device=where)
    for begin in range(0, inputs, _COLUMNS):
        end = min(begin + _COLUMNS, inputs)
        if whole is None:
            unit = torch.zeros(end - begin, inputs, dtype=dtype, device=where)
            unit[:, begin:end].fill_diagonal_(1)
            columns = linear.product_of(unit)[:, here].float().t()
        else:
            columns = whole[here, begin:end]
        total += (columns + b @ a[:, begin:end]).double().square().sum(1)
    return total.cpu()


def _dense(linear: Linear) -> Tensor | None:
    """Return a matrix in host memory, `[outputs, inputs]` f32; None: unit rows must be multiplied.

    On a GPU they always are, as it may have no room for a whole matrix of 32 bits.
    """
    matrix = linear.matrix
    if matrix is None or matrix.values.device.type != "cpu":
        return None
    numbers, groups = matrix.values, matrix.groups
    if groups is None and numbers.is_floating_point() and matrix.scales is None:
        return numbers.float()
    if groups is None or not groups.is_plain or groups.packing.layout not in _TILED:
        return None
    return cpu_packing.dense(numbers, groups)


def folded(b: Tensor, magnitudes: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return B `[outputs, r]` f32 of a term with magnitudes, and the gain of its layer's product.

    `magnitudes` and `total`, the sums of squares over all inputs, are `[outputs]`.
    """
    lengths = total.sqrt().float()
    # Rows that fill up a rank's part are zeros, with magnitudes of zero.
    gain = torch.where((lengths == 0) & (magnitudes == 0), 0.0, magnitudes / lengths)
    return b * gain[:, None], gain - 1.0
