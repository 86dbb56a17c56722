"""Scales that move between a matrix and what makes its inputs, and the searches for them.

Inputs are divided and the columns of weights multiplied by them, so a model computes the same:
the norm before a matrix takes the division, or the rows of the matrix before. SmoothQuant (Xiao et
al., 2023) makes activations easy to round, AWQ (Lin et al., 2024) the weights that they meet.
"""

from collections.abc import Callable, Iterator

import torch
from slipstream.layers.norm import LayerNorm, Norm
from torch import Tensor

from slipstream_quantize.grid import Grid, output_error
from slipstream_quantize.observe import Seen

Rounding = Callable[[Tensor], Tensor]
Held = Callable[[Tensor], Tensor]  # scales as they are where they move to
RATIOS = [step / 10 for step in range(1, 11)]
ALPHAS = [step / 10 for step in range(3, 10)]
_LEAST = 1e-4
_MOST_ROWS = 512  # of weights whose outputs are compared, evenly from all
_MOST = 2.0**15  # of a scale and its inverse: 16-bit norms can hold the quotients


def held_by(norm: Norm | LayerNorm, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a norm's factors are divided by where `scales [k]` are wanted, fp32.

    Quotients are rounded to `dtype`. A factor whose quotient would be zero stays as it is; one that
    is zero stays so, whatever divides it.
    """
    before, stored = _divided(norm, scales, dtype)
    return torch.where(before == 0, scales, before / (stored + _one(norm)))


def divide_norm(norm: Norm | LayerNorm, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide a norm's factors, in place; return what they were divided by; see `held_by`.

    Columns of weights that are multiplied by it leave the model as it was.
    """
    held = held_by(norm, scales, dtype)
    _stored(norm).copy_(_divided(norm, scales, dtype)[1])
    if isinstance(norm, LayerNorm):
        norm.refresh()
        if norm.bias is not None:
            norm.bias.copy_((norm.bias.float() / held).to(dtype))
    return held


def _divided(norm: Norm | LayerNorm, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a norm's factors, and what is stored of their quotients, fp32."""
    one, own = _one(norm), _stored(norm).float()
    before = own + one
    stored = (before / scales - one).to(dtype).float()
    is_kept = (stored + one == 0) | ~stored.isfinite()
    return before, torch.where(is_kept, own, stored)


def _one(norm: Norm | LayerNorm) -> float:
    """Return what factors are more than what is stored."""
    return norm.added if isinstance(norm, LayerNorm) else float(norm.plus_one)


def _stored(norm: Norm | LayerNorm) -> Tensor:
    found = norm.stored if isinstance(norm, LayerNorm) else norm.weight
    assert found is not None, "only factors can be divided"
    return found


def awq_scales(weight: Tensor, seen: Seen, grid: Grid, held: Held) -> Tensor:
    """Search the scales with the least error of outputs of `weight [n, k]`, rounded; `[k]`.

    They are powers of the mean size of inputs, alone and over one of the size of weights, as they
    are `held`.
    """
    best = torch.ones_like(seen.mean)
    rows = weight[:: -(-len(weight) // _MOST_ROWS)]
    least = _error(rows, best, seen, grid)
    for wanted in awq_candidates(weight, seen.mean, grid):
        scales = held(wanted)
        error = _error(rows, scales, seen, grid)
        if error < least:
            best, least = scales, error
    return best


def awq_candidates(weight: Tensor, mean: Tensor, grid: Grid) -> Iterator[Tensor]:
    """Yield scales `[k]` for inputs of the mean size `mean [k]`."""
    n, k = weight.shape
    groups = weight.abs().view(n, -1, grid.group(k))
    size = (groups / groups.amax(-1, keepdim=True).clamp_min(1e-30)).view(n, k).mean(0)
    for ratio in RATIOS:
        yield bounded(mean.pow(ratio), mean)
        yield bounded(mean.pow(ratio) / size.pow(1 - ratio).clamp_min(_LEAST), mean)


def smooth_scales(weight: Tensor, seen: Seen, grid: Grid, rounding: Rounding, held: Held) -> Tensor:
    """Search the scales with the least error of outputs where activations are rounded too; `[k]`.

    A power of the largest activations is over one of the largest weights, as it is `held`.
    """
    rows = seen.rows
    exact = rows @ weight.T
    largest = weight.abs().amax(0).clamp_min(1e-5)
    best = torch.ones_like(seen.most)
    least = float("inf")
    for alpha in (None, *ALPHAS):
        scales = best
        if alpha is not None:
            scales = held(bounded(seen.most.pow(alpha) / largest.pow(1 - alpha), seen.most))
        scaled = weight * scales
        fitted = grid.fit(scaled)
        rounded = grid.values(grid.round(scaled, fitted), fitted)
        error = float((rounding(rows / scales) @ rounded.T - exact).pow(2).sum())
        if error < least:
            best, least = scales, error
    return best


def bounded(scales: Tensor, sizes: Tensor) -> Tensor:
    """Bring scales around 1, the geometric mean of the largest and the smallest.

    Inputs of the size 0 do not count: they would be far smaller than all others. Theirs is the
    smallest, so that no weight of theirs is the largest of a row.
    """
    is_read = sizes > 0
    if not bool(is_read.any()):
        return torch.ones_like(scales)
    scales = scales.clamp_min(_LEAST)
    low, high = torch.aminmax(scales[is_read])
    scales = torch.where(is_read, scales, low) / (low * high).sqrt()
    return scales.clamp(1 / _MOST, _MOST)


def _error(weight: Tensor, scales: Tensor, seen: Seen, grid: Grid) -> float:
    scaled = weight * scales
    fitted = grid.fit(scaled, clips=False)
    rounded = grid.values(grid.round(scaled, fitted), fitted) / scales
    return output_error(weight - rounded, seen.second)
