"""GPTQ (Frantar et al., 2023): round a column, correct those that are not rounded yet.

Columns come in the order of their inputs' size; scales were chosen before, so a file needs no order
(`actorder: static`).
"""

import torch
from slipstream.errors import CheckpointError
from torch import Tensor

from slipstream_quantize.grid import Fitted, Grid

DAMP = 0.01  # of the mean of the diagonal is added to it
_COLUMNS = 128  # whose corrections reach the columns behind them at once
_TRIES = 6  # with ten times as much damping each


def gptq(weight: Tensor, second: Tensor, grid: Grid, fitted: Fitted) -> Tensor:
    """Return `q [n, k]` of `weight [n, k]` fp32.

    Args:
        weight: the matrix; it stays as it is.
        second: `[k, k]` fp32, the mean of `x x^T` over its inputs.
        grid: the numbers.
        fitted: scales and zeros.

    Raises `CheckpointError` if `second` is not finite.
    """
    order = torch.argsort(second.diagonal(), descending=True, stable=True)
    upper = _inverse_factor(second[order][:, order])
    k = weight.shape[1]

    def columns(values: Tensor) -> Tensor:
        return values[:, order].T.contiguous()  # each column contiguous: they come one by one

    left = columns(weight)
    scale, zero = (columns(grid.columns(each, k)) for each in fitted[:2])
    q = torch.empty_like(left)
    for first in range(0, k, _COLUMNS):
        last = min(first + _COLUMNS, k)
        block, errors = left[first:last], torch.empty_like(left[first:last])
        inner = upper[first:last, first:last]
        for i in range(last - first):
            at = first + i
            q[at] = grid.snap(block[i], scale[at], zero[at])
            off = torch.addcmul(block[i], q[at] - zero[at], scale[at], value=-1, out=errors[i])
            off /= inner[i, i]
            block[i:].addr_(inner[i, i:], off, alpha=-1)
        left[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)
    found = torch.empty_like(weight)
    found[:, order] = q.T
    return found


def _inverse_factor(second: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped `second`.

    With J the reversal of an order and `J second J = L L^T`, the inverse is `U^T U` with
    `U = J L^-1 J`: one factor and one triangular solve.
    """
    diagonal = second.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        raise CheckpointError("activations of the calibration text are not finite")
    damp = float(diagonal.mean()) * DAMP or 1.0
    for _ in range(_TRIES):
        turned = second.flip(0, 1)
        turned.diagonal().add_(damp)
        factor, failed = torch.linalg.cholesky_ex(turned)
        if not int(failed):
            one = torch.eye(len(factor), device=factor.device, dtype=factor.dtype)
            inverse: Tensor = torch.linalg.solve_triangular(factor, one, upper=False)
            return inverse.flip(0, 1)
        damp *= 10
    raise CheckpointError("activations of the calibration text are too large to invert")
