"""Layers whose weights lie on several ranks, in the place of those that one rank has whole."""

import torch
from torch import Tensor

from slipstream.kernels.comm.ranks import Ranks
from slipstream.layers.embedding import Embedding, Head, silenced
from slipstream.layers.linear import NormLinear
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class TokensOfRank:
    """Rows of an embedding of which each rank has as many, in order: `[n] i64 -> [n, hidden]`."""

    def __init__(self, embedding: Embedding, ranks: Ranks) -> None:
        self._embedding, self._ranks = embedding, ranks
        self._rows = embedding.table.shape[0]
        self._first = self._rows * ranks.rank

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up the tokens; those of other ranks come from there."""
        own = token_ids - self._first
        is_own = (own >= 0) & (own < self._rows)
        found = self._embedding.own(own.clamp(0, self._rows - 1))
        return self._ranks.sum(found * is_own[:, None].to(found.dtype))


class GatheredHead(Head):
    """A head of which each rank has some tokens: rank 0 gets the logits of all.

    On other ranks they are zeros that lie as rank 0's: kernels of samples run on all ranks.
    """

    def __init__(self, head: Head, ranks: Ranks, vocab_size: int) -> None:
        self._head, self._ranks, self._vocab_size = head, ranks, vocab_size
        self.table = head.table
        self.silent, head.silent = head.silent, None  # among the tokens of all ranks

    @property
    def product(self) -> NormLinear:
        """The rank's part."""
        return self._head.product

    @product.setter
    def product(self, place: NormLinear) -> None:
        self._head.product = place

    def __call__(self, norm: RowNorm, residual: Residual) -> Tensor:
        """Logits of `norm(residual)`, `[n, hidden] -> [n, vocab]`."""
        found = self._ranks.gather(self._head(norm, residual))
        if self._ranks.rank > 0:
            return found.new_zeros(len(found), self._vocab_size)
        return silenced(found[:, : self._vocab_size].contiguous(), self.silent)


class SpreadNorm:
    """RMS norm over rows of which each rank has a part: `kernels/elementwise/norm.py`, in torch.

    Parts that several ranks have count as often for each of them, so the mean is that of a row.
    `ranks` is set before the first call.
    """

    ranks: Ranks

    def __init__(self, w: WeightSource, size: int, eps: float, plus_one: bool) -> None:
        self.weight, self.eps, self.plus_one = w.tensor("weight", size), eps, plus_one

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `[n, size]`, the rank's part of rows."""
        values, factor = x.float(), self.weight.float()
        total = self.ranks.sum(values.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(total / (x.shape[-1] * self.ranks.size) + self.eps)
        return (values * scale * (1 + factor if self.plus_one else factor)).to(x.dtype)


class SpreadLayerNorm:
    """Layer norm over rows of which each rank has a part: the mean, then the variance, of a row.

    `ranks` is set before the first call.
    """

    ranks: Ranks

    def __init__(self, w: WeightSource, size: int, eps: float, has_bias: bool) -> None:
        self.weight, self.eps = w.tensor("weight", size), eps
        self.bias = w.tensor("bias", size) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `[n, size]`, the rank's part of rows."""
        values = x.float()
        values = values - self._mean(values)
        values = values * torch.rsqrt(self._mean(values.square()) + self.eps) * self.weight.float()
        return (values if self.bias is None else values + self.bias.float()).to(x.dtype)

    def _mean(self, values: Tensor) -> Tensor:
        total = self.ranks.sum(values.sum(-1, keepdim=True))
        return total / (values.shape[-1] * self.ranks.size)


class _Summed:
    """What stands behind a sum over ranks: a norm, or nothing."""

    def __init__(self, ranks: Ranks, norm: RowNorm | None) -> None:
        self._ranks, self._norm = ranks, norm

    def __call__(self, x: Tensor) -> Tensor:
        total = self._ranks.sum(x)
        return total if self._norm is None else self._norm(total)


def summed(ranks: Ranks, norm: RowNorm | None) -> RowNorm:
    """Return the norm of the sum over ranks; None: the sum alone."""
    return _Summed(ranks, norm)
