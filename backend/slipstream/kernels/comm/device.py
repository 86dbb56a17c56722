"""Ranks on GPUs of one host: sums and exchanges by kernels over each other's memory, or NCCL."""

from collections.abc import Sequence

import torch
from slipstream_runtime.ranks import RankMemory
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.comm import all_reduce, nccl
from slipstream.kernels.comm.peer_memory import PeerMemory, check_peers
from slipstream.kernels.comm.ranks import HostRanks
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm

_WORD = torch.int64
_MULTIPLE = 16  # bytes that sums take


class DeviceRanks:
    """Ranks whose tensors lie on GPUs; calls are kernels in the current stream.

    A sum has the bits of `HostRanks` whatever its size, unless NCCL makes it.

    Args:
        memory: of all ranks on the host, for what GPUs do not exchange.
        device: this rank's.
        members: those that exchange, by their numbers there, which are their GPUs'.
        keeps_bits: whether a large sum may not have other bits than a small one: then no NCCL.
    """

    def __init__(
        self,
        memory: RankMemory,
        device: torch.device,
        keeps_bits: bool,
        members: Sequence[int] | None = None,
    ) -> None:
        self._host = HostRanks(memory, members)
        self.rank, self.size = self._host.rank, self._host.size
        check_peers(device, range(memory.size) if members is None else members)
        self._memory = PeerMemory(device, self.rank, self._host.exchange_bytes)
        self._peers = self._memory.peers
        self._keeps_bits = keeps_bits
        self._nccl: nccl.Nccl | None = None
        have = self._host.least(int(nccl.is_available()))
        if have and not keeps_bits:
            self._nccl = nccl.Nccl(self.rank, self.size, self._host.spread_bytes)

    @property
    def nccl(self) -> nccl.Nccl | None:
        """The communicator of large sums; None: there is none."""
        return self._nccl

    def start(self, limit_s: float) -> None:
        """Bound waits by what a rank may be late once all serve."""
        self._memory.limit(limit_s)

    def late(self) -> str | None:
        """Return why waits on the GPU have failed, if they have."""
        return self._memory.late() or (None if self._nccl is None else self._nccl.error())

    def least(self, value: int) -> int:
        """Return the least value of all ranks, by the host's memory; see `Ranks`."""
        return self._host.least(value)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks; see `Ranks`."""
        return self._sum(x, None).view(x.shape)

    def add_sum(self, values: Tensor, x: Tensor) -> None:
        """Add the sum over ranks in place; see `Ranks`."""
        self._sum(x, values)

    def add_sum_norm(self, values: Tensor, x: Tensor, norm: RmsNorm) -> Tensor:
        """Add the sum over ranks, and return the norm, by one kernel for few rows; see `Ranks`."""
        is_whole = values.is_contiguous() and x.is_contiguous() and not self._keeps_bits
        if is_whole and all_reduce.can_norm(len(x), x.shape[1], x.itemsize, self.size):
            return all_reduce.sum_norm(self._peers, x, values, norm)
        self._sum(x, values)
        return rms_norm(values, *norm)

    def _sum(self, x: Tensor, values: Tensor | None) -> Tensor:
        """Return the sum of `x`, or `values` once it is added to these in place."""
        if x.numel() == 0:
            return x if values is None else values
        way = all_reduce.way_of(x.nbytes, self.size, self._nccl is not None)
        if way == "nccl":
            return self._sum_by_nccl(x.contiguous(), values)
        lacking = -x.nbytes % _MULTIPLE // x.itemsize
        is_whole = values is None or (values.is_contiguous() and values.data_ptr() % 16 == 0)
        if lacking or not is_whole or x.data_ptr() % 16 or not x.is_contiguous():
            padded = functional.pad(x.flatten(), (0, lacking)).clone()
            before = None
            if values is not None:
                before = functional.pad(values.flatten(), (0, lacking)).clone()
            out = self._sum_whole(way, padded, before)[: x.numel()].view(x.shape)
            return out if values is None else values.copy_(out)
        return self._sum_whole(way, x.view(-1), None if values is None else values.view(-1))

    def _sum_whole(self, way: str, x: Tensor, values: Tensor | None) -> Tensor:
        out = torch.empty_like(x) if values is None else values
        step = all_reduce.ROOM_BYTES // x.itemsize
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            before = None if values is None else values[part]
            all_reduce.sum_into(self._peers, way, x[part], before, out[part])
        return out

    def _sum_by_nccl(self, x: Tensor, values: Tensor | None) -> Tensor:
        assert self._nccl is not None, "it is a way only where it is there"
        out = torch.empty_like(x)
        self._nccl.sum(x, out)
        return out if values is None else values.add_(out.view(values.shape))

    def gather(self, x: Tensor) -> Tensor:
        """Return all columns on rank 0; see `Ranks`."""
        if x.numel() == 0:
            return x.new_empty(len(x), self.size * x.shape[1]) if self.rank == 0 else x
        count, width = self.size if self.rank == 0 else 0, x.shape[1]
        lacking = -width * x.itemsize % 8 // x.itemsize
        rows = functional.pad(x, (0, lacking)) if lacking else x.contiguous()
        words = rows.view(_WORD)
        out = words.new_empty(len(x), count, words.shape[1])
        step = max(1, all_reduce.ROOM_BYTES // (8 * words.shape[1]))
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            all_reduce.exchange(self._peers, words[part], out[part], 0, count)
        if not count:
            return x
        return out.view(x.dtype)[..., :width].reshape(len(x), -1)

    def spread(self, x: Tensor) -> None:
        """Take the values of rank 0; see `Ranks`."""
        if x.numel():
            words = x.view(-1).view(_WORD)
            all_reduce.exchange(self._peers, words, words, 0, 1)
