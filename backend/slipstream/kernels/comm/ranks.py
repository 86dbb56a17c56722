"""Sums and gathers over the ranks of one engine, each of which calls them in the same order.

A sum adds the ranks' values in the order of ranks, in fp32, and rounds once: its bits depend on
nothing else, and are the same on all ranks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from slipstream_runtime.ranks import EXCHANGE_BYTES, RankMemory
from torch import Tensor

from slipstream.kernels.comm.all_reduce import total
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm


class Ranks(Protocol):
    """What a layer needs of the others."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, of one shape and dtype, on every rank."""

    def add_sum(self, values: Tensor, x: Tensor) -> None:
        """Add the sum of all ranks' `x`, of their shape and dtype, to `values`, rounded once."""

    def add_sum_norm(self, values: Tensor, x: Tensor, norm: RmsNorm) -> Tensor:
        """Add the sum to `values [n, m]`, as `add_sum`, and return their norm then."""

    def gather(self, x: Tensor) -> Tensor:
        """Return on rank 0 all ranks' `x [n, m]` side by side, `[n, size * m]`; elsewhere `x`."""

    def spread(self, x: Tensor) -> None:
        """Overwrite `x` with that of rank 0, on every rank."""

    def least(self, value: int) -> int:
        """Return the least value of all ranks, on every rank; the host waits for the others."""

    def start(self, limit_s: float) -> None:
        """Take note that all serve from here on, and how late a rank may be."""

    def late(self) -> str | None:
        """Return why an exchange on the device has failed; None: none has."""


class Part(NamedTuple):
    """A rank's part of what all ranks' sum adds to the residual sum: an addend of its reader."""

    ranks: Ranks
    x: Tensor

    def add_to(self, values: Tensor) -> None:
        """Add the sum to `values`, in place."""
        self.ranks.add_sum(values, self.x)

    def add_norm(self, values: Tensor, norm: RmsNorm) -> Tensor:
        """Add the sum to `values`, in place; return their norm."""
        return self.ranks.add_sum_norm(values, self.x, norm)


def _pieces(flat: Tensor) -> Iterator[slice]:
    """Yield the pieces of a flat tensor that an exchange has room for, in order."""
    step = EXCHANGE_BYTES // flat.itemsize
    for begin in range(0, len(flat), step):
        yield slice(begin, begin + step)


class HostRanks:
    """Ranks on CPUs of one host: tensors go through the memory that they share.

    Args:
        memory: of all ranks.
        members: those that exchange, by their numbers there; None: all.
    """

    def __init__(self, memory: RankMemory, members: Sequence[int] | None = None) -> None:
        assert memory.rank is not None, "a supervisor computes nothing"
        self._members = members
        ranks = range(memory.size) if members is None else members
        self.rank, self.size = ranks.index(memory.rank), len(ranks)
        self._memory = memory
        self._turn = 0
        self._buffers = [
            [torch.frombuffer(memory.buffer(rank, turn), dtype=torch.uint8) for turn in range(2)]
            for rank in ranks
        ]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks; see `Ranks`."""
        return self._sum(x, None)

    def add_sum(self, values: Tensor, x: Tensor) -> None:
        """Add the sum over ranks in place; see `Ranks`."""
        values.copy_(self._sum(x, values.reshape(-1)).view(values.shape))

    def _sum(self, x: Tensor, before: Tensor | None) -> Tensor:
        """Return the sum of `x`, and of `before`, which is flat, if there is one."""
        flat = x.contiguous().view(-1)
        out = torch.empty_like(flat)
        for part in _pieces(flat):
            parts = self._exchange(flat[part])
            out[part] = total(parts, None if before is None else before[part])
        return out.view(x.shape)

    def add_sum_norm(self, values: Tensor, x: Tensor, norm: RmsNorm) -> Tensor:
        """Add the sum over ranks in place, and return the norm; see `Ranks`."""
        self.add_sum(values, x)
        return rms_norm(values, *norm)

    def gather(self, x: Tensor) -> Tensor:
        """Return all columns on rank 0; see `Ranks`."""
        flat = x.contiguous().view(-1)
        found = x.new_empty(self.size, flat.numel()) if self.rank == 0 else None
        for part in _pieces(flat):
            given = self._exchange(flat[part])
            if found is not None:
                for rank, values in enumerate(given):
                    found[rank, part] = values
        if found is None:
            return x
        return found.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def spread(self, x: Tensor) -> None:
        """Take the values of rank 0; see `Ranks`."""
        flat = x.view(-1)
        for part in _pieces(flat):
            flat[part].copy_(self._exchange(flat[part])[0])

    def least(self, value: int) -> int:
        """Return the least value of all ranks; see `Ranks`."""
        return min(int(part) for part in self._exchange(torch.tensor([value])))

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, of at most `EXCHANGE_BYTES`, flat; valid until the next call."""
        return self._exchange(x.contiguous().view(-1))

    def exchange_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes that every rank gives, as many on each, by rank."""
        parts = self._exchange(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return [bytes(part.tolist()) for part in parts]

    def spread_bytes(self, own: bytes) -> bytes:
        """Return the bytes that rank 0 gives, as many on each."""
        return self.exchange_bytes(own)[0]

    def start(self, limit_s: float) -> None:
        """Bound waits; see `Ranks`."""
        self._memory.limit_s = limit_s

    def late(self) -> str | None:
        """Return nothing: waits of the host raise their own errors."""

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Return every rank's `part`, flat, of `EXCHANGE_BYTES` at most; valid until the next."""
        self._turn ^= 1
        count = part.numel()
        views = [
            buffers[self._turn][: count * part.itemsize].view(part.dtype)
            for buffers in self._buffers
        ]
        views[self.rank].copy_(part)
        self._memory.wrote(self._turn, count * part.itemsize)
        self._memory.meet(self._members)
        return views
