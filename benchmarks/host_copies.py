"""The copies between the cache and host memory by themselves: their bandwidth, and how to keep them
going while a decode runs. Used by host_tier.py.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from slipstream.kvcache.host import Direction
from slipstream.runner.transfers import Transfers
from torch import Tensor

_REPEAT = 5


def pinned(size: int) -> Tensor:
    """Host memory, page-locked where there is a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def seconds(run: Callable[[], object]) -> float:
    """Median time of a run in the current stream."""
    times = []
    for _ in range(_REPEAT + 1):
        if torch.cuda.is_available():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def dma_rates(size: int, device: str) -> dict[Direction, float]:
    """Bytes a second of one large copy each way: the measured PCIe bandwidth."""
    on_host, on_device = pinned(size), torch.empty(size, dtype=torch.uint8, device=device)
    return {
        Direction.OUT: size / seconds(lambda: on_host.copy_(on_device, non_blocking=True)),
        Direction.IN: size / seconds(lambda: on_device.copy_(on_host, non_blocking=True)),
    }


class Copies:
    """Random blocks of a cache, and random slots of host memory for them."""

    def __init__(self, cache: Tensor, num_moved: int) -> None:
        num_blocks = cache.shape[1]
        self._transfers = Transfers(cache, num_blocks)
        self._num_bytes = num_moved * self._transfers.block_bytes
        places = (torch.randperm(num_blocks)[:num_moved].tolist() for _ in range(2))
        self._pairs = list(zip(*places, strict=True))
        self._num_begun = dict.fromkeys(Direction, 0)

    def begin(self, direction: Direction) -> None:
        """All of them, in copies of as many as one may have."""
        most = self._transfers.max_pairs
        for first in range(0, len(self._pairs), most):
            self._transfers.start(direction, self._pairs[first : first + most])
            self._num_begun[direction] += 1

    def has_ended(self, direction: Direction) -> bool:
        """All that was begun, without waiting for it."""
        return self._transfers.num_ended(direction) == self._num_begun[direction]

    def figures(self, direction: Direction) -> tuple[float, float]:
        """Bytes a second, and seconds of the host's thread, medians."""
        times, on_host = [], []
        for _ in range(_REPEAT):
            begin = time.perf_counter()
            self.begin(direction)
            on_host.append(time.perf_counter() - begin)
            while not self.has_ended(direction):
                self._transfers.wait()
            times.append(time.perf_counter() - begin)
        return self._num_bytes / statistics.median(times), statistics.median(on_host)


@contextmanager
def endless(copies: Copies) -> Iterator[Callable[[], None]]:
    """A function that, called at every step, keeps both directions busy."""

    def feed() -> None:
        for direction in Direction:
            if copies.has_ended(direction):
                copies.begin(direction)

    yield feed
    if torch.cuda.is_available():
        torch.cuda.synchronize()
