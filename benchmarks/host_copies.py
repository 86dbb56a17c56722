"""Ways to copy blocks between the cache and pinned host memory: their bandwidth, and what they cost
a decode that runs meanwhile. Used by host_tier.py; on a CPU all of them are the one that there is.

    kernel N   copy_blocks by N CTAs, which read or write pinned memory themselves
    dma        one copy by DMA for each layer's part of a block
    gathered   a kernel brings the blocks of a part of device memory side by side, DMA does the rest
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from slipstream.kernels.copy_blocks import copy_blocks, route
from torch import Tensor

KERNEL_CTAS = (8, 16, 32, 64, 132)
STAGED_BLOCKS = 64
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


def dma_rates(size: int, device: str) -> dict[str, float]:
    """Bytes a second of one large copy each way: the measured PCIe bandwidth."""
    on_host, on_device = pinned(size), torch.empty(size, dtype=torch.uint8, device=device)
    return {
        "out": size / seconds(lambda: on_host.copy_(on_device, non_blocking=True)),
        "in": size / seconds(lambda: on_device.copy_(on_host, non_blocking=True)),
    }


class Ways:
    """Random blocks of a cache, and random slots of host memory for them."""

    def __init__(self, parts: list[Tensor], num_moved: int) -> None:
        device = parts[0].device
        num_blocks = len(parts[0])
        sizes = [part[0].nbytes for part in parts]
        self.block_bytes, self.num_moved = sum(sizes), num_moved
        self._parts = parts
        self._memory = pinned(num_blocks * self.block_bytes).view(num_blocks, self.block_bytes)
        self._hosts = self._split(self._memory)
        self._staged = torch.empty(
            (STAGED_BLOCKS, self.block_bytes), dtype=torch.uint8, device=device
        )
        staged = self._split(self._staged)
        blocks, slots = (torch.randperm(num_blocks)[:num_moved].tolist() for _ in range(2))
        self._pairs = {
            "out": list(zip(blocks, slots, strict=True)),
            "in": list(zip(slots, blocks, strict=True)),
        }
        self._sides = {"out": (parts, self._hosts), "in": (self._hosts, parts)}
        self._routes = {way: route(*sides, device) for way, sides in self._sides.items()}
        self._gather = {"out": route(parts, staged, device), "in": route(staged, parts, device)}
        self._tensors = {
            way: torch.tensor(pairs, dtype=torch.int32, device=device)
            for way, pairs in self._pairs.items()
        }
        places = torch.arange(num_moved, device=device) % STAGED_BLOCKS
        ends = [self._tensors["out"][:, 0], places], [places, self._tensors["in"][:, 1]]
        self._staged_pairs = {
            way: torch.stack(end, 1).int().contiguous()
            for way, end in zip(("out", "in"), ends, strict=True)
        }

    def _split(self, memory: Tensor) -> list[Tensor]:
        offset, views = 0, []
        for part in self._parts:
            size = part[0].nbytes
            piece = memory[:, offset : offset + size].view(part.dtype)
            views.append(piece.view(len(memory), *part.shape[1:]))
            offset += size
        return views

    def names(self) -> list[str]:
        """All ways there are here."""
        if self._parts[0].device.type == "cpu":
            return ["kernel 1"]
        return [*(f"kernel {n}" for n in KERNEL_CTAS), "dma", "gathered"]

    def run(self, name: str, direction: str) -> None:
        """Put the copies into the current stream."""
        if name == "dma":
            source, destination = self._sides[direction]
            for a, b in self._pairs[direction]:
                for x, y in zip(source, destination, strict=True):
                    y[b].copy_(x[a], non_blocking=True)
        elif name == "gathered":
            self._run_gathered(direction)
        else:
            ctas = int(name.removeprefix("kernel "))
            copy_blocks(self._tensors[direction], self._routes[direction], ctas)

    def _run_gathered(self, direction: str) -> None:
        pairs, staged = self._pairs[direction], self._staged_pairs[direction]
        for first in range(0, self.num_moved, STAGED_BLOCKS):
            some = slice(first, first + STAGED_BLOCKS)
            if direction == "out":
                copy_blocks(staged[some], self._gather[direction], 32)
            for i, (a, b) in enumerate(pairs[some]):
                if direction == "out":
                    self._memory[b].copy_(self._staged[i], non_blocking=True)
                else:
                    self._staged[i].copy_(self._memory[a], non_blocking=True)
            if direction == "in":
                copy_blocks(staged[some], self._gather[direction], 32)

    def rate(self, name: str, direction: str) -> float:
        """Bytes a second, alone."""
        return self.num_moved * self.block_bytes / seconds(lambda: self.run(name, direction))

    def host_seconds(self, name: str, direction: str) -> float:
        """What a call costs the host's thread."""
        times = []
        for _ in range(_REPEAT):
            begin = time.perf_counter()
            self.run(name, direction)
            times.append(time.perf_counter() - begin)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return statistics.median(times)


@contextmanager
def endless(ways: Ways, name: str) -> Iterator[Callable[[], None]]:
    """A function that, called at every step, keeps both directions busy in streams of their own."""
    if not torch.cuda.is_available():
        yield lambda: ways.run(name, "in")
        return
    streams = {direction: torch.cuda.Stream() for direction in ("out", "in")}
    ended = {direction: torch.cuda.Event() for direction in streams}

    def feed() -> None:
        for direction, stream in streams.items():
            if ended[direction].query():
                with torch.cuda.stream(stream):
                    ways.run(name, direction)
                    ended[direction].record()

    yield feed
    torch.cuda.synchronize()
