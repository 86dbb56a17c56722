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
RATIOS = [step / 10 for step in range(1, 11)]
ALPHAS = [step / 10 for step in range(3, 10)]
_LEAST = 1e-4
_MOST_ROWS = 512  # of weights whose outputs are compared, evenly from all
_MOST = 2.0**15  # of a scale and its inverse: 16-bit norms can hold the quotients


def divide_norm(norm: Norm | LayerNorm, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide a norm's factors, in place; return what they were divided by, `[k]` fp32.

    That is not quite `scales`, as the new factors are rounded to `dtype`: columns of weights that
    are multiplied by it leave the model as it was.
    """
    one = float(isinstance(norm, Norm) and norm.plus_one)
    assert norm.weight is not None, "only factors can be divided"
    before = norm.weight.float() + one
    stored = (before / scales - one).to(dtype).float()
    after = stored + one
    is_kept = (after == 0) | (before == 0) | ~after.isfinite()
    stored = torch.where(is_kept, norm.weight.float(), stored)
    norm.weight.copy_(stored)
    divided = torch.where(is_kept, torch.ones_like(before), before / after)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        norm.bias.copy_((norm.bias.float() / divided).to(dtype))
    return divided


def awq_scales(weight: Tensor, seen: Seen, grid: Grid) -> Tensor:
    """Search the scales with the least error of outputs of `weight [n, k]`, rounded; `[k]`.

    They are powers of the mean size of inputs, alone and over one of the size of weights.
    """
    best = torch.ones_like(seen.mean)
    rows = weight[:: -(-len(weight) // _MOST_ROWS)]
    least = _error(rows, best, seen, grid)
    for scales in awq_candidates(weight, seen.mean, grid):
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
        yield bounded(mean.pow(ratio))
        yield bounded(mean.pow(ratio) / size.pow(1 - ratio).clamp_min(_LEAST))


def smooth_scales(weight: Tensor, seen: Seen, grid: Grid, rounding: Rounding) -> Tensor:
    """Search the scales with the least error of outputs where activations are rounded too; `[k]`.

    A power of the largest activations is over one of the largest weights.
    """
    exact = seen.rows @ weight.T
    largest = weight.abs().amax(0).clamp_min(1e-5)
    best = torch.ones_like(seen.most)
    least = float("inf")
    for alpha in (None, *ALPHAS):
        scales = best
        if alpha is not None:
            scales = bounded(seen.most.pow(alpha) / largest.pow(1 - alpha))
        scaled = weight * scales
        fitted = grid.fit(scaled)
        rounded = grid.values(grid.round(scaled, fitted), fitted)
        error = float((rounding(seen.rows / scales) @ rounded.T - exact).pow(2).sum())
        if error < least:
            best, least = scales, error
    return best


def bounded(scales: Tensor) -> Tensor:
    """Bring scales around 1, the geometric mean of the largest and the smallest."""
    scales = scales.clamp_min(_LEAST)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return scales.clamp(1 / _MOST, _MOST)


def _error(weight: Tensor, scales: Tensor, seen: Seen, grid: Grid) -> float:
    scaled = weight * scales
    fitted = grid.fit(scaled, clips=False)
    rounded = grid.values(grid.round(scaled, fitted), fitted) / scales
    return output_error(weight - rounded, seen.second)
