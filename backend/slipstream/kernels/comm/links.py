"""Links between the stages of a pipeline, in a ring: each sends states to the next one.

On CPUs gloo carries them, between GPUs NCCL. A count in the memory that all ranks of a host share
says how many are handed over: so a rank that waits in vain can name the other, and one that fails
leaves none waiting.
"""

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from slipstream_runtime.ranks import RankError, RankMemory
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from slipstream.kernels.comm.nccl import Nccl

_START = timedelta(seconds=600)  # until all ranks have come
_KEPT = 16  # sends whose states are kept for them at most; stages are fewer


class Ring:
    """The stages of a pipeline, each of `size // num_stages` ranks: rank r is of stage `r // that`.

    A rank sends to that which has its part of the next stage; the last stage sends to the first.
    """

    def __init__(self, rank: int, size: int, num_stages: int) -> None:
        each = size // num_stages
        self.size = size
        self.before, self.after = (rank - each) % size, (rank + each) % size
        self.members = range(rank // each * each, rank // each * each + each)

    def edges(self, rank: int) -> Sequence[tuple[int, int]]:
        """Return the two pairs `(sender, receiver)` of a rank, in an order that suits all."""
        return sorted({(self.before, rank), (rank, self.after)})


class Links(Protocol):
    """What a stage needs of its neighbours, in the order of steps."""

    def send(self, states: Tensor) -> None:
        """Send states `[n, hidden]` to the next stage, behind what the device computes."""

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return states `[rows, width]` of the stage before. Raises `RankError`."""

    def error(self) -> str | None:
        """Return why a link has failed; None: none has."""


class _Told:
    """Counts what is handed over, in the memory of all ranks."""

    def __init__(self, memory: RankMemory, ring: Ring) -> None:
        self._memory, self._before = memory, ring.before
        self._num_handed = self._num_taken = 0

    def hand(self) -> None:
        self._num_handed += 1
        self._memory.hand(self._num_handed)

    def wait(self) -> None:
        self._num_taken += 1
        self._memory.await_handed(self._before, self._num_taken)


def _store_at(address: str) -> TCPStore:
    """Return a store that listens on one address; of itself it would listen on all."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        None,
        True,
        timeout=_START,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class HostLinks:
    """Links between CPUs, by gloo; all ranks make them at the same time.

    Args:
        memory: of all ranks.
        ring: the stages.
    """

    def __init__(self, memory: RankMemory, ring: Ring) -> None:
        assert memory.rank is not None
        self._told, self._ring = _Told(memory, ring), ring
        store = None
        if memory.rank == 0:
            store = _store_at(memory.address(0))
        port = int(memory.gather(b"0" if store is None else str(store.port).encode())[0])
        if store is None:
            store = TCPStore(memory.address(0), port, None, False, timeout=_START)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=memory.address(memory.rank))]
        options._timeout = _START
        self._group = ProcessGroupGloo(store, memory.rank, memory.size, options)
        memory.meet()  # nobody needs the store from here on
        self._sends: deque[tuple[object, Tensor]] = deque(maxlen=_KEPT)

    def send(self, states: Tensor) -> None:
        """Send a copy; see `Links`."""
        if not states.numel():
            return
        own = states.contiguous().clone()
        while len(self._sends) == _KEPT:
            self._sends.popleft()[0].wait()  # type: ignore[attr-defined]
        self._sends.append((self._group.send([own], self._ring.after, 0), own))
        self._told.hand()

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Wait for states; see `Links`."""
        states = torch.empty((rows, width), dtype=dtype)
        if rows:
            self._told.wait()
            try:
                self._group.recv([states], self._ring.before, 0).wait()
            except RuntimeError as error:
                raise RankError(f"states of rank {self._ring.before}: {error}") from error
        return states

    def error(self) -> str | None:
        """Return nothing: waits of the host raise their own errors."""


class DeviceLinks:
    """Links between GPUs, by NCCL: a communicator for each pair, on streams of their own.

    A send may wait for a stage that is busy. The stream that computes never waits for it: if it
    did, stages could wait for each other in a ring.

    Args:
        memory: of all ranks.
        ring: the stages.
        device: this rank's.
    """

    def __init__(self, memory: RankMemory, ring: Ring, device: torch.device) -> None:
        assert memory.rank is not None
        self._rank = rank = memory.rank
        self._told, self._device = _Told(memory, ring), device
        ids = memory.gather(Nccl.new_id(rank))  # of the pair in which each rank sends

        def link(sender: int, receiver: int) -> Nccl:
            return Nccl(int(rank == receiver), 2, lambda _: ids[sender], rank)

        made = {edge: link(*edge) for edge in ring.edges(rank)}
        self._out, self._in = made[rank, ring.after], made[ring.before, rank]
        self._sending = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._receiving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._connect(ring.edges(rank))

    def _connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Pass a value over each link, in one order on all ranks.

        NCCL connects a pair in its first send and receive, and the host of one waits there until
        the other's has come: so both must come at once, not behind a count of what is sent.
        """
        value = torch.zeros(1, dtype=torch.float32, device=self._device)
        for edge in edges:
            if edge[0] == self._rank:
                self._out.send(value, 1)
            else:
                self._in.receive(value, 0)
        torch.cuda.current_stream(self._device).synchronize()

    def send(self, states: Tensor) -> None:
        """Send a copy; see `Links`."""
        if not states.numel():
            return
        own = states.contiguous().clone()
        self._sending.wait_stream(torch.cuda.current_stream(self._device))
        own.record_stream(self._sending)
        with torch.cuda.stream(self._sending):
            self._out.send(own, 1)
        self._told.hand()

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Wait for states, on the device; see `Links`."""
        states = torch.empty((rows, width), dtype=dtype, device=self._device)
        if rows:
            self._told.wait()
            current = torch.cuda.current_stream(self._device)
            self._receiving.wait_stream(current)  # which may have used this memory before
            states.record_stream(self._receiving)
            with torch.cuda.stream(self._receiving):
                self._in.receive(states, 0)
            current.wait_stream(self._receiving)
        return states

    def error(self) -> str | None:
        """Return why NCCL has failed; see `Links`."""
        return self._out.error() or self._in.error()
