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
    left = weight[:, order]
    scale = grid.columns(fitted.scale, k)[:, order]
    zero = grid.columns(fitted.zero, k)[:, order]
    q = torch.empty_like(left)
    for first in range(0, k, _COLUMNS):
        last = min(first + _COLUMNS, k)
        block, errors = left[:, first:last], torch.empty_like(left[:, first:last])
        inner = upper[first:last, first:last]
        for i in range(last - first):
            at = first + i
            q[:, at] = grid.snap(block[:, i], scale[:, at], zero[:, at])
            off = (block[:, i] - (q[:, at] - zero[:, at]) * scale[:, at]) / inner[i, i]
            block[:, i:] -= off[:, None] * inner[i, i:]
            errors[:, i] = off
        left[:, last:] -= errors @ upper[first:last, last:]
    found = torch.empty_like(q)
    found[:, order] = q
    return found


def _inverse_factor(second: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped `second`."""
    diagonal = second.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        raise CheckpointError("activations of the calibration text are not finite")
    damp = float(diagonal.mean()) * DAMP or 1.0
    for _ in range(_TRIES):
        damped = second.clone()
        damped.diagonal().add_(damp)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(factor)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return upper
        damp *= 10
    raise CheckpointError("activations of the calibration text are too large to invert")
