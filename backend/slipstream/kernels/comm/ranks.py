"""Sums and gathers over the ranks of one engine, each of which calls them in the same order.

A sum adds the ranks' values in the order of ranks, in fp32, and rounds once: its bits depend on
nothing else, and are the same on all ranks.
"""

from typing import Protocol

import torch
from slipstream_runtime.ranks import EXCHANGE_BYTES, RankMemory
from torch import Tensor


class Ranks(Protocol):
    """What a layer needs of the others."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, of one shape and dtype, on every rank."""

    def gather(self, x: Tensor) -> Tensor:
        """Return on rank 0 all ranks' `x [n, m]` side by side, `[n, size * m]`; elsewhere `x`."""

    def spread(self, x: Tensor) -> None:
        """Overwrite `x` with that of rank 0, on every rank."""

    def least(self, value: int) -> int:
        """Return the least value of all ranks, on every rank."""


class HostRanks:
    """Ranks on CPUs of one host: tensors go through the memory that they share.

    Args:
        memory: of all ranks.
    """

    def __init__(self, memory: RankMemory) -> None:
        assert memory.rank is not None, "a supervisor computes nothing"
        self.rank, self.size = memory.rank, memory.size
        self._memory = memory
        self._turn = 0
        self._buffers = [
            [torch.frombuffer(memory.buffer(rank, turn), dtype=torch.uint8) for turn in range(2)]
            for rank in range(memory.size)
        ]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks; see `Ranks`."""
        flat = x.contiguous().view(-1)
        out, step = torch.empty_like(flat), EXCHANGE_BYTES // x.itemsize
        for begin in range(0, len(flat), step):
            parts = self._exchange(flat[begin : begin + step])
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            out[begin : begin + step] = total
        return out.view(x.shape)

    def gather(self, x: Tensor) -> Tensor:
        """Return all columns on rank 0; see `Ranks`."""
        flat, step = x.contiguous().view(-1), EXCHANGE_BYTES // x.itemsize
        found = x.new_empty(self.size, flat.numel()) if self.rank == 0 else None
        for begin in range(0, len(flat), step):
            parts = self._exchange(flat[begin : begin + step])
            if found is not None:
                for rank, part in enumerate(parts):
                    found[rank, begin : begin + step] = part
        if found is None:
            return x
        return found.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def spread(self, x: Tensor) -> None:
        """Take the values of rank 0; see `Ranks`."""
        flat, step = x.view(-1), EXCHANGE_BYTES // x.itemsize
        for begin in range(0, len(flat), step):
            part = flat[begin : begin + step]
            part.copy_(self._exchange(part)[0])

    def least(self, value: int) -> int:
        """Return the least value; see `Ranks`."""
        return min(int(part) for part in self._exchange(torch.tensor([value])))

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Return what every rank gives, flat and of `EXCHANGE_BYTES` at most, until the next."""
        self._turn ^= 1
        count = part.numel()
        views = [
            buffers[self._turn][: count * part.itemsize].view(part.dtype)
            for buffers in self._buffers
        ]
        views[self.rank].copy_(part)
        self._memory.meet()
        return views
