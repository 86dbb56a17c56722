"""Links between GPUs, over an NCCL whose pairs connect in their first call, as the library's do.

On two GPUs a rank stood in its first send until the other received, and the other waited for the
count of what was sent.
"""

import contextlib
import os
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from slipstream.kernels.comm import links
from slipstream.kernels.comm.links import DeviceLinks, Ring
from slipstream_runtime.ranks import RankMemory
from torch import Tensor

STREAM = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
LIMIT_S = 30.0  # only reached where a pair never meets


class Pairs:
    """The communicators of all ranks; a call of one end waits for the other's first call."""

    def __init__(self) -> None:
        self.meetings: dict[bytes, threading.Barrier] = {}
        self.sent: dict[bytes, deque[Tensor]] = defaultdict(deque)
        self.lock = threading.Lock()

    def communicator(self, rank: int, size: int, spread: object, name: int) -> "Pair":
        assert callable(spread)
        own = spread(b"")
        with self.lock:
            self.meetings.setdefault(own, threading.Barrier(size))
        return Pair(self.meetings[own], self.sent[own])


class Pair:
    """An end of a pair."""

    def __init__(self, meeting: threading.Barrier, sent: deque[Tensor]) -> None:
        self._meeting, self._sent = meeting, sent
        self._is_connected = False

    def _connect(self) -> None:
        if not self._is_connected:
            self._meeting.wait(LIMIT_S)
        self._is_connected = True

    def send(self, x: Tensor, to: int) -> None:
        self._sent.append(x.clone())
        self._connect()

    def receive(self, out: Tensor, of: int) -> None:
        self._connect()
        out.copy_(self._sent.popleft())


@pytest.mark.parametrize(("size", "num_stages"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_a_stage_sends_before_the_next_one_looks(
    monkeypatch: pytest.MonkeyPatch, size: int, num_stages: int
) -> None:
    pairs = Pairs()
    new_id = staticmethod(lambda rank: b"pair of %d" % rank)
    made = type("Nccl", (), {"__new__": lambda cls, *args: pairs.communicator(*args)})
    monkeypatch.setattr(made, "new_id", new_id, raising=False)
    monkeypatch.setattr(links, "Nccl", made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    descriptor = RankMemory.create(size)

    def run(rank: int) -> list[float]:
        memory = RankMemory(descriptor, size, rank)
        memory.limit_s = 10 * LIMIT_S
        link = DeviceLinks(memory, Ring(rank, size, num_stages), torch.device("cpu"))
        is_first, found = rank < size // num_stages, []
        for step in range(3):
            states = torch.full((2, 3), float(10 * step + rank))
            if is_first:
                link.send(states)
            found.append(link.receive(2, 3, torch.float32)[0, 0].item())
            if not is_first:
                link.send(states)
        return found

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    os.close(descriptor)
    for rank, values in enumerate(found):
        assert values == [10 * step + Ring(rank, size, num_stages).before for step in range(3)]
