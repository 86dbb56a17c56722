"""Linear layers that are watched, and that round what they read."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from slipstream.layers.linear import Linear
from slipstream.quant.matrix import E4M3
from torch import Tensor

from slipstream_quantize.grid import E4M3_MAX
from slipstream_quantize.recipe import BLOCK

INT8_MAX = 127.0
_MOST_ROWS, _ROWS_OF_STEP = 1024, 256  # of a text, and of a step, that are kept as they are


def round_int8(x: Tensor) -> Tensor:
    """Round rows `[n, k]` to 8-bit integers, a scale for each."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / INT8_MAX
    return ((x.float() / scale).round() * scale).to(x.dtype)


def round_e4m3(x: Tensor) -> Tensor:
    """Round rows `[n, k]` to e4m3, a scale for each."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX
    return ((x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() * scale).to(x.dtype)


def round_blocks(x: Tensor) -> Tensor:
    """Round rows `[n, k]` to e4m3, a scale for each 128 of them."""
    n, k = x.shape
    parts = torch.nn.functional.pad(x, (0, -k % BLOCK)).view(-1, BLOCK)
    return round_e4m3(parts).view(n, -1)[:, :k]


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"int8": round_int8, "e4m3": round_e4m3}


@dataclass
class Seen:
    """Sums over the rows `[n, k]` that a layer reads.

    Attributes:
        count: rows.
        second: `[k, k]`, the mean of `x x^T` after `finish`.
        mean: `[k]`, mean sizes.
        most: `[k]`, largest sizes.
        rows: some of them as they are.
    """

    count: int = 0
    second: Tensor = field(default_factory=lambda: torch.zeros(()))
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    most: Tensor = field(default_factory=lambda: torch.zeros(()))
    kept: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Add rows `[n, k]`."""
        x = x.float()
        if not self.count:
            k = x.shape[1]
            self.second, self.mean, self.most = x.new_zeros(k, k), x.new_zeros(k), x.new_zeros(k)
        self.second.addmm_(x.T, x)
        sizes = x.abs()
        self.mean += sizes.sum(0)
        torch.maximum(self.most, sizes.amax(0), out=self.most)
        self.count += len(x)
        every = max(1, len(x) // _ROWS_OF_STEP) | 1  # odd: not always the same places of pieces
        self.kept.append(x[::every].clone())

    def finish(self, weight: Tensor) -> "Seen":
        """Turn sums into means; of no rows at all (an expert without any), inputs count alike.

        Args:
            weight: `[n, k]`, which they meet, on its device.
        """
        if not self.count:
            ones = torch.ones(weight.shape[1], device=weight.device)
            return Seen(1, ones.diag(), ones, ones, [ones[None]])
        self.second /= self.count
        self.mean /= self.count
        return self

    @property
    def rows(self) -> Tensor:
        """At most 1,024 rows, evenly from the text."""
        every = torch.cat(self.kept)
        return every[:: -(-len(every) // _MOST_ROWS)]

    def divided(self, scales: Tensor) -> "Seen":
        """Return what would have been seen of inputs over `scales [k]`."""
        second = self.second / scales[:, None] / scales
        kept = [part / scales for part in self.kept]
        return Seen(self.count, second, self.mean / scales, self.most / scales, kept)


class Probe(Linear):
    """A plain linear layer that can be watched, and that can round its rows first.

    Attributes:
        names: of its matrices in the decoder, in the order of their rows.
        sizes: rows of each.
        seen: adds up what it reads; None: nothing.
        rounding: of what it reads; None: none.
    """

    def __init__(self, linear: Linear, names: list[str], sizes: list[int]) -> None:
        super().__init__(linear.scheme, linear.weights, linear.bias, linear.is_sliced)
        self.names = names
        self.sizes = sizes
        self.seen: Seen | None = None
        self.rounding: Callable[[Tensor], Tensor] | None = None

    @property
    def values(self) -> Tensor:
        """The weights, `[n, k]`; writing changes what the layer computes."""
        assert self.matrix is not None, "plain layers have plain matrices"
        return self.matrix.values

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, in] -> [n, out]`."""
        if self.seen is not None:
            self.seen.add(x)
        return super().__call__(x if self.rounding is None else self.rounding(x))
