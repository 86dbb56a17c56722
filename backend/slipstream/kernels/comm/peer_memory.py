"""Memory of each rank's GPU that all other ranks of the host map."""

import logging
import os
import socket
from collections.abc import Callable, Sequence

import torch
from slipstream_runtime.ranks import RankError
from torch import Tensor

from slipstream.kernels.comm.all_reduce import EMPTY_BYTES, GRID, MEMORY_BYTES, PACKS_AT, Peers

_log = logging.getLogger(__name__)
_LAZY = 1  # cudaIpcMemLazyEnablePeerAccess
START_S = 600.0  # a wait while ranks compile, capture and measure


def check_peers(device: torch.device, others: Sequence[int]) -> None:
    """Raise `RankError` with the pair's names if a GPU cannot read the memory of another rank's."""
    for other in others:
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            raise RankError(
                f"rank {device.index} on {socket.gethostname()}: cuda:{device.index} cannot read "
                f"the memory of cuda:{other}: tensor_parallel needs GPUs with peer access"
            )


class PeerMemory:
    """An allocation on each rank, mapped by all; and what waits on the GPU need.

    torch's allocator does not own it: it would hand out parts of what a handle opens as a whole.

    Args:
        device, rank: of this process.
        exchange: from this rank's bytes to those of all, by rank; every rank calls it.
    """

    def __init__(
        self, device: torch.device, rank: int, exchange: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        from cupy.cuda import Device, runtime

        self.rank, self._host = rank, socket.gethostname()
        with torch.cuda.device(device), Device(device.index):
            own = int(runtime.malloc(MEMORY_BYTES))
            runtime.memset(own, 0, MEMORY_BYTES)
            runtime.memset(own + PACKS_AT, 0xFF, EMPTY_BYTES)
            runtime.deviceSynchronize()  # before any other rank writes there
            handles = exchange(bytes(runtime.ipcGetMemHandle(own)))
            bases = tuple(
                own if other == rank else self._opened(runtime, handle, other)
                for other, handle in enumerate(handles)
            )
        epochs = torch.zeros(GRID, dtype=torch.int32, device=device)
        self._limit = torch.zeros(1, dtype=torch.int64, device=device)
        self._late: Tensor = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self.peers = Peers(bases, rank, epochs, self._limit, self._late.data_ptr())
        self.limit(START_S)
        torch.cuda.synchronize(device)
        exchange(b"here")  # all have mapped all before anyone's first kernel

    def _opened(self, runtime: object, handle: bytes, other: int) -> int:
        try:
            return int(runtime.ipcOpenMemHandle(handle, _LAZY))  # type: ignore[attr-defined]
        except Exception as error:
            raise RankError(
                f"rank {self.rank} on {self._host} (pid {os.getpid()}) cannot map the memory of "
                f"rank {other}: {error}"
            ) from error

    def limit(self, seconds: float) -> None:
        """Bound waits on the GPU from here on: then the kernel fails, and `late` says why."""
        self._seconds = seconds
        self._limit.fill_(int(seconds * 1e9))

    def late(self) -> str | None:
        """Return which rank this one's GPU has waited for in vain; None: none."""
        rank, epoch = self._late.tolist()
        if not rank:
            return None
        return (
            f"rank {self.rank} on {self._host}: rank {rank - 1} did not come to exchange "
            f"{epoch & 0xFFFFFFFF:,} on the GPU within {self._seconds:g} s"
        )
