"""Norms of rows as layers: by root mean square, or by mean and variance."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise import norm
from slipstream.layers.source import WeightSource


class RowNorm(Protocol):
    """A function of rows that a place may apply before its linear layer, or behind it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[n, size]`."""


class Norm:
    """RMS norm over the last dimension, with a learned weight, or one more than that (Gemma).

    GEMMs may fuse it.
    """

    def __init__(self, w: WeightSource, size: int, eps: float, plus_one: bool = False) -> None:
        self.weight = w.tensor("weight", size)
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[n, size]`."""
        return norm.rms_norm(x, self.weight, self.eps, self.plus_one)


class BareNorm(Norm):
    """An RMS norm without a weight: its weight is ones."""

    def __init__(self, w: WeightSource, size: int, eps: float) -> None:
        self.weight = torch.ones(size, dtype=w.dtype, device=w.device)
        self.eps = eps
        self.plus_one = False


class LayerNorm:
    """Layer norm (Ba et al., 2016) over the last dimension, by torch: in fp32, rounded once.

    Args:
        w: where its weight is, and its bias.
        size: of a row.
        eps: added to the variance.
        has_weight, has_bias: whether it has them.
        groups: rows `[n, groups, size]` have a weight for each group, in one tensor or (as
            `norms.0`, ...) in one each.
        added: to weights.
    """

    def __init__(
        self,
        w: WeightSource,
        size: int,
        eps: float,
        has_weight: bool = True,
        has_bias: bool = True,
        groups: int = 0,
        added: float = 0.0,
    ) -> None:
        self.weight = None
        if has_weight and groups and not w.has("weight"):
            names = [f"norms.{i}.weight" for i in range(groups)]
            self.weight = w.stacked(names, [size] * groups).view(groups, size)
        elif has_weight:
            self.weight = w.tensor("weight", *((groups, size) if groups else (size,)))
        self.stored, self.added = self.weight, added
        self.refresh()
        self._is_grouped = groups > 0
        self.bias = w.tensor("bias", size) if has_bias else None
        self.eps = eps

    def refresh(self) -> None:
        """Make the weight of `stored`, the checkpoint's own, which may have changed since."""
        if self.stored is not None and self.added:
            self.weight = self.stored + self.added

    @property
    def is_plain(self) -> bool:
        """Whether it has one weight, of all rows: then GEMMs may fuse it."""
        return self.weight is not None and not self._is_grouped

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of `[n, size]`."""
        if not self._is_grouped:
            return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        assert self.weight is not None, "groups differ by their weights"
        rows = functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (rows * self.weight.float()).to(x.dtype)


class PartNorm:
    """A norm of heads in which all but `count` numbers are zeros, as these are of its weight.

    Args:
        norm: of the heads as they are padded.
        count: numbers of a head that the checkpoint has.
    """

    def __init__(self, norm: Norm | LayerNorm, count: int) -> None:
        self._norm, self._count = norm, count
        self._centres = isinstance(norm, LayerNorm)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `[n, heads, size]`, in fp32, rounded once."""
        norm, rows = self._norm, x.float()
        squares = rows.pow(2).sum(-1, keepdim=True)
        if self._centres:
            mean = rows.sum(-1, keepdim=True) / self._count
            rows = rows - mean
            zeros = x.shape[-1] - self._count
            squares = rows.pow(2).sum(-1, keepdim=True) - zeros * mean.pow(2)
        rows = rows * torch.rsqrt(squares / self._count + norm.eps)
        if norm.weight is not None:
            factor = norm.weight.float()
            rows = rows * (1 + factor if isinstance(norm, Norm) and norm.plus_one else factor)
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            rows = rows + norm.bias.float()
        return rows.to(x.dtype)


def identity(x: Tensor) -> Tensor:
    """Return the rows: the norm of a place that has none."""
    return x


class Factor:
    """A number in the place of a norm: rows times it (Granite's multiplier of residuals)."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `[n, size]`."""
        return x * self.value


class ScaledNorm:
    """A norm, whose rows a number multiplies."""

    def __init__(self, own: RowNorm, value: float) -> None:
        self._own, self._value = own, value

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise and multiply the rows of `[n, size]`."""
        return self._own(x) * self._value
