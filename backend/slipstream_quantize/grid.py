"""Grids of numbers that weights are rounded to: scales, zeros, and the search for their ranges.

A weight `w` becomes `q` with `(q - zero) * scale` near `w`; `q` is an integer, or a number of e4m3
or e2m1. A range that leaves out the largest weights of a group can have less error than one that
holds all: the search takes the best of `STEPS` ranges (Lin et al., 2024; Frantar et al., 2023).
Numbers of e4m3 need none left out: a scale up to twice as large moves them between weights.

Where no text decides, the search of integers sums cubes of errors. Squares favour ranges that cut
off more, and a few inputs are a hundred times the others: there a cut weight costs more than it
saves. Groups of e2m1 are small, and squares serve them better.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from slipstream.kernels.gemm.packing import E2M1
from slipstream.quant.matrix import E4M3
from slipstream.quant.rounding import E4M3_STEPS
from torch import Tensor

from slipstream_quantize.recipe import Recipe

E4M3_MAX, E2M1_MAX = 448.0, 6.0
STEPS, SMALLEST_RANGE = 24, 0.5  # ranges from all of a group's down to this part of it
_POWERS = {"int": 3}  # of errors that are summed without a text; of other kinds 2
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # neighbours of E2M1
_MOST_CORRELATED = 256  # inputs of a group whose correlations the search weighs


class Fitted(NamedTuple):
    """Scales and zeros of a matrix `[n, k]`: `[n, groups]` each, fp32.

    `overall` is what nvfp4 multiplies its scales by before they are rounded to e4m3.
    """

    scale: Tensor
    zero: Tensor
    overall: float = 1.0


class Grid:
    """The numbers of a recipe.

    Args:
        recipe: kind, bits, group, zeros.
        dtype: in which scales are stored: they are rounded to it before weights are to them.
    """

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        self.recipe = recipe
        self.dtype = dtype
        top = 2 ** (recipe.bits - 1)
        ends = {"int": (-top, top - 1), "e4m3": (-E4M3_MAX, E4M3_MAX)}
        self.low, self.high = ends.get(recipe.kind, (-E2M1_MAX, E2M1_MAX))

    def group(self, inputs: int) -> int:
        """Return the inputs that share a scale."""
        return self.recipe.group or inputs

    def columns(self, values: Tensor, inputs: int) -> Tensor:
        """Spread `[n, groups]` over inputs, `[n, inputs]`."""
        return values.repeat_interleave(self.group(inputs), 1)[:, :inputs]

    def snap(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the nearest `q`, fp32; all shapes broadcast."""
        x = weight / scale
        if self.recipe.kind == "int":
            return x.round_().add_(zero).clamp_(self.low, self.high)
        if self.recipe.kind == "e4m3":
            return x.clamp(self.low, self.high).to(E4M3).float()
        table = torch.tensor(E2M1, device=x.device)
        steps = torch.tensor(_BETWEEN, device=x.device)
        return table[torch.bucketize(x.abs(), steps)].copysign(x)

    def round(self, weight: Tensor, fitted: Fitted) -> Tensor:
        """Return `q [n, k]` of a whole matrix."""
        scale, zero = (self.columns(each, weight.shape[1]) for each in fitted[:2])
        return self.snap(weight, scale, zero)

    def values(self, q: Tensor, fitted: Fitted) -> Tensor:
        """Return the weights that `q [n, k]` stands for, fp32."""
        scale, zero = (self.columns(each, q.shape[1]) for each in fitted[:2])
        return (q - zero) * scale

    def fit(self, weight: Tensor, second: Tensor | None = None, clips: bool = True) -> Fitted:
        """Choose scales and zeros for `weight [n, k]` fp32.

        Args:
            weight: the matrix.
            second: `[k, k]`, the mean of `x x^T` over its inputs, by which the error of outputs
                counts; None: that of the weights does.
            clips: whether to search ranges, if the recipe does.
        """
        low, high = self._ends(weight)
        overall = 1.0
        if self.recipe.kind == "e2m1":
            largest = float(weight.abs().max().clamp_min(1e-30))
            overall = E4M3_MAX * E2M1_MAX / largest
        best = self._fitted(low, high, 1.0, overall)
        if not (clips and self.recipe.clips):
            return best
        parts = None if second is None else self._diagonal(second)
        grouped = self._grouped(weight)
        least = self._errors(grouped, best, parts)
        for part in self._parts():
            found = self._fitted(low, high, part, overall)
            errors = self._errors(grouped, found, parts)
            is_better = errors < least
            least = torch.where(is_better, errors, least)
            scale = torch.where(is_better, found.scale, best.scale)
            best = Fitted(scale, torch.where(is_better, found.zero, best.zero), overall)
        return best

    def _parts(self) -> list[float]:
        """Return the ranges that are tried beside the whole one, in parts of it."""
        if self.recipe.kind == "e4m3":
            return [2 ** (step / E4M3_STEPS) for step in range(1, E4M3_STEPS)]
        return torch.linspace(1.0, SMALLEST_RANGE, STEPS)[1:].tolist()

    def _grouped(self, weight: Tensor) -> Tensor:
        """View as `[n, groups, group]`, the last group filled up with zeros."""
        n, k = weight.shape
        size = self.group(k)
        missing = -k % size
        return torch.nn.functional.pad(weight, (0, missing)).view(n, -1, size)

    def _ends(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest weight of each group, at most and at least 0."""
        low, high = torch.aminmax(self._grouped(weight), dim=-1)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        if not self.recipe.symmetric:
            return low, high
        largest = torch.maximum(-low, high)
        if self.recipe.format == "fp8":
            largest = self._over_blocks(largest, torch.amax)
        return -largest, largest

    def _over_blocks(self, values: Tensor, made: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Replace `[n, groups]`, of 0 and more, by what is made of the rows of each block."""
        size, (n, groups) = self.recipe.group, values.shape
        rows = torch.nn.functional.pad(values, (0, 0, 0, -n % size)).view(-1, size, groups)
        return made(rows, 1).repeat_interleave(size, 0)[:n]

    def _fitted(self, low: Tensor, high: Tensor, part: float, overall: float) -> Fitted:
        """Return scales and zeros by which the grid covers this part of the ranges."""
        if self.recipe.symmetric:
            scale = self._stored(high * part / self.high, overall)
            return Fitted(scale, torch.zeros_like(scale), overall)
        scale = self._stored((high - low) * part / (self.high - self.low), overall)
        zero = (self.low - (low * part / scale).round()).clamp(self.low, self.high)
        return Fitted(scale, zero, overall)

    def _stored(self, scale: Tensor, overall: float) -> Tensor:
        """Round scales to what a file holds; none is zero."""
        if self.recipe.kind == "e2m1":
            least = 2.0**-9  # of e4m3
            return (scale * overall).clamp(least, E4M3_MAX).to(E4M3).float() / overall
        if self.recipe.format == "fp8":
            return scale.clamp_min(1e-30)  # in fp32
        rounded = scale.to(self.dtype).float()
        return torch.where(rounded == 0, torch.ones_like(rounded), rounded)

    def _diagonal(self, second: Tensor) -> Tensor:
        """Return the blocks of `second` that groups meet, `[groups, group, group]`."""
        k = second.shape[0]
        size = self.group(k)
        if size > _MOST_CORRELATED:
            return second.diagonal().view(-1, size)
        blocks = second.view(k // size, size, k // size, size)
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()

    def _errors(self, grouped: Tensor, fitted: Fitted, parts: Tensor | None) -> Tensor:
        """Return the errors of groups, or of the blocks they are in, `[n, groups]`."""
        scale, zero = fitted.scale[..., None], fitted.zero[..., None]
        off = self.snap(grouped, scale, zero).sub_(zero).mul_(scale).sub_(grouped)
        if parts is None:
            errors = off.abs_().pow_(_POWERS.get(self.recipe.kind, 2)).sum(-1)
            return self._over_blocks(errors, torch.sum) if self.recipe.format == "fp8" else errors
        if parts.ndim == 2:
            return (off.pow(2) * parts).sum(-1)
        turned = off.transpose(0, 1)
        return (torch.bmm(turned, parts) * turned).sum(-1).T


def output_error(difference: Tensor, second: Tensor | None) -> float:
    """Return the mean squared error of outputs, summed over them, of a difference of weights."""
    if second is None:
        return float(difference.pow(2).sum())
    return float(((difference @ second) * difference).sum())
