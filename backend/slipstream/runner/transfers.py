"""Copies of blocks between the device's cache and host memory, beside the steps.

Each direction has a stream of its own, in which copies end in the order in which they began. No
step waits for a stream, nor a stream for a step: a copy starts when its source is complete and
its destination is unused, and its reader polls whether it has ended. See host.py.

In host memory a block's parts, one a layer, lie side by side. On a GPU its copy engine moves them
(kernels/cache/dma.py): it takes no multiprocessor from a step, only some of the memory's time.
"""

import time
import weakref
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cache.dma import BlockDma
from slipstream.kvcache.host import Direction, Mover
from slipstream.runner.group import Group
from slipstream.runner.plan import Plan

_MAX_PAIRS = 128  # of one copy: a step that needs a block waits for all of its copy
_MAX_PARTS = 1 << 15  # of a direction that the driver has: a host with more waits for room
_NUM_SAMPLES = 7
_TRIAL_BYTES = 64 << 20


def _memory(num_bytes: int) -> Tensor:
    """Host memory. torch's own allocator of page-locked memory would round up to a power of two."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        raise ConfigError(f"kv_cache_host_bytes: {num_bytes} bytes cannot be had") from None


def _pin(memory: Tensor, owner: object) -> None:
    """Page-lock memory for as long as its owner lives: the next to get these addresses may ask,
    too.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, num_bytes = memory.data_ptr(), memory.nbytes
    status = cudart.cudaHostRegister(address, num_bytes, 0)
    if int(status) != 0:
        reason = cudart.cudaGetErrorString(status)
        raise ConfigError(f"kv_cache_host_bytes: {num_bytes} bytes cannot be pinned: {reason}")
    weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False


Pairs = Sequence[tuple[int, int]]


class _CopyOnDevice:
    """A copy in a stream."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.began, self.ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def has_ended(self) -> bool:
        """Without waiting for it."""
        return bool(self.ended.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """Return the seconds that it took, once it has ended."""
        return float(self.began.elapsed_time(self.ended)) / 1e3


class _OneWay:
    """The copies of one direction."""

    def __init__(self, cache: Tensor, slots: Tensor, direction: Direction) -> None:
        self.num_ended = 0
        self.rates: deque[float] = deque(maxlen=_NUM_SAMPLES)  # bytes/s
        self._cache, self._slots = cache, slots
        self._is_out = direction is Direction.OUT
        self._dma: BlockDma | None = None
        self._waiting: deque[Pairs] = deque()  # copies that the driver does not have yet
        self._copies: deque[_CopyOnDevice] = deque()  # that it has, and that have not ended
        self._max_copies = max(1, _MAX_PARTS // (_MAX_PAIRS * len(cache)))  # of these
        self._num_unreported = 0  # ended, and counted by the next `poll`
        if cache.is_cuda:
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
            self._dma = BlockDma(cache, slots, self._is_out, self._stream)

    def start(self, pairs: Pairs) -> None:
        if self._dma is None:
            begin = time.perf_counter()
            self._copy_on_host(pairs)
            seconds = time.perf_counter() - begin
            self.rates.append(self._num_bytes(pairs) / max(seconds, 1e-9))
            self._num_unreported += 1
        else:
            self._waiting.append(pairs)
            self._hand_over(self._dma)

    def _num_bytes(self, pairs: Pairs) -> int:
        return len(pairs) * self._slots[0].nbytes

    def _hand_over(self, dma: BlockDma) -> None:
        """Pass waiting copies to the driver, as far as there is room."""
        while self._waiting and len(self._copies) < self._max_copies:
            pairs = self._waiting.popleft()
            copy = _CopyOnDevice(self._num_bytes(pairs))
            copy.began.record(self._stream)
            dma(pairs)
            copy.ended.record(self._stream)
            self._copies.append(copy)

    def _copy_on_host(self, pairs: Pairs) -> None:
        sources, destinations = (list(side) for side in zip(*pairs, strict=True))
        if self._is_out:
            self._slots[destinations] = self._cache[:, sources].transpose(0, 1)
        else:
            self._cache[:, destinations] = self._slots[sources].transpose(0, 1)

    def poll(self, waits: bool = False) -> int:
        """Return how many have ended; with `waits`, the oldest among them if there is one."""
        self.num_ended += self._num_unreported
        self._num_unreported = 0
        while self._copies and (waits or self._copies[0].has_ended()):
            copy = self._copies.popleft()
            copy.ended.synchronize()
            waits = False
            self.rates.append(copy.num_bytes / max(copy.seconds(), 1e-9))
            self.num_ended += 1
        if self._dma is not None:
            self._hand_over(self._dma)
        return self.num_ended


class Transfers:
    """Host memory for `num_slots` blocks, and the copies to and from it."""

    max_pairs = _MAX_PAIRS

    @torch.inference_mode()
    def __init__(self, cache: Tensor, num_slots: int) -> None:
        """`cache` is `[part, block, ...]`, contiguous, on the device.

        Raises ConfigError if so much memory cannot be had.
        """
        self.num_slots = num_slots
        self.block_bytes = cache[:, 0].nbytes
        self.num_bytes = num_slots * self.block_bytes
        self._num_blocks = cache.shape[1]
        memory = _memory(self.num_bytes)
        if cache.is_cuda:
            _pin(memory, self)
        slots = memory.view(num_slots, len(cache), -1)
        data = cache.flatten(2).view(torch.uint8)
        self._ways = {direction: _OneWay(data, slots, direction) for direction in Direction}
        if cache.is_cuda:
            torch.cuda.synchronize(cache.device)  # the cache is being cleared
            self._try()

    def _try(self) -> None:
        """Measure first rates, with blocks that are not in use yet, each to its slot and back."""
        ways = self._ways
        most = max(1, _TRIAL_BYTES // self.block_bytes)
        size = min(_MAX_PAIRS, self._num_blocks, self.num_slots, most)
        pairs = [(i, i) for i in range(size)]
        for _ in range(2):  # the first one is slow
            for direction in Direction:
                self.start(direction, pairs)
                self.wait()
                way = ways[direction]
                way.rates = deque([way.rates[-1]], _NUM_SAMPLES)
        for way in ways.values():
            way.num_ended = 0

    @torch.inference_mode()
    def start(self, direction: Direction, pairs: Pairs) -> None:
        """Copy from blocks to slots, or from slots to blocks: up to `max_pairs` (from, to)."""
        assert 0 < len(pairs) <= self.max_pairs
        self._ways[direction].start(pairs)

    def num_ended(self, direction: Direction) -> int:
        """Return how many of the copies that were started have ended."""
        return self._ways[direction].poll()

    def wait(self) -> None:
        """Block until the oldest copy of each direction has ended."""
        for way in self._ways.values():
            way.poll(waits=True)

    def rate(self, direction: Direction) -> float | None:
        """Bytes a second, as measured lately; None before the first copy."""
        rates = self._ways[direction].rates
        return median(rates) if rates else None


class _Together:
    """The copies of several caches whose blocks have the same numbers."""

    max_pairs = _MAX_PAIRS

    def __init__(self, parts: Sequence[Transfers]) -> None:
        self._parts = parts
        self.num_slots = parts[0].num_slots
        self.block_bytes = sum(part.block_bytes for part in parts)
        self.num_bytes = sum(part.num_bytes for part in parts)

    def start(self, direction: Direction, pairs: Pairs) -> None:
        """Copy blocks of all; see `Transfers`."""
        for part in self._parts:
            part.start(direction, pairs)

    def num_ended(self, direction: Direction) -> int:
        """Return how many copies have ended in all of them."""
        return min(part.num_ended(direction) for part in self._parts)

    def wait(self) -> None:
        """Block until the oldest copy of each direction has ended in all of them."""
        for part in self._parts:
            part.wait()

    def rate(self, direction: Direction) -> float | None:
        """Bytes a second, one after another; None before the first copy."""
        seconds = 0.0
        for part in self._parts:
            rate = part.rate(direction)
            if rate is None:
                return None
            seconds += part.block_bytes / rate
        return self.block_bytes / seconds


def host_memory(plan: Plan, group: Group, caches: Sequence[Tensor]) -> tuple[Mover | None, int]:
    """Return host memory for blocks, if the configuration has any on all ranks, and its bytes."""
    num_slots = plan.config.kv_cache_host_bytes // plan.config.num_ranks // plan.block_bytes
    num_slots = group.agree(num_slots)
    made = transfers_of(caches, num_slots) if num_slots else None
    return made, num_slots * plan.block_bytes


def transfers_of(caches: Sequence[Tensor], num_slots: int) -> Transfers | _Together:
    """Make host memory for `num_slots` blocks of these caches; see `Transfers`."""
    parts = [Transfers(cache, num_slots) for cache in caches]
    return parts[0] if len(parts) == 1 else _Together(parts)
