"""Copies of blocks between the device's cache and host memory, beside the steps.

Each direction has a stream of its own, in which copies end in the order in which they began. No
step waits for a stream, nor a stream for a step: a copy begins when its source is complete and
nobody touches its destination, and who needs it looks whether it has ended. See host.py.

In host memory a block's parts, one or more a layer, lie side by side. A GPU copies by a kernel,
which reads and writes pinned memory at 93 % of what DMA reaches there whatever the size of the
parts; DMA gets as far only with parts of several megabytes.
"""

import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.host import Direction
from slipstream.errors import ConfigError
from slipstream.kernels.copy_blocks import Route, copy_blocks, route

_MAX_PAIRS = 128  # of one copy: who waits for a block may wait for the others, too
_MAX_COPIES = 64  # of a direction that are under way
_CTAS = 32  # enough for PCIe, and few beside a step
_ALIGNMENT = 16  # bytes, of a part
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


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def host_block_bytes(parts: Sequence[Tensor]) -> int:
    """What a block takes in host memory."""
    return sum(_aligned(part[0].nbytes) for part in parts)


class _OnDevice:
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
        """That it took, once it has ended."""
        return float(self.began.elapsed_time(self.ended)) / 1e3


class _OneWay:
    """The copies of one direction."""

    def __init__(self, way: Route, block_bytes: int, device: torch.device) -> None:
        self.num_ended = 0
        self.rates: deque[float] = deque(maxlen=_NUM_SAMPLES)  # bytes/s
        self._way = way
        self._block_bytes = block_bytes
        self._device = device
        self._copies: deque[_OnDevice] = deque()  # that have not ended, as far as is known
        self._num_begun = 0
        self._num_untold = 0  # ended, and told of by the next `poll`
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            shape = (_MAX_COPIES, _MAX_PAIRS, 2)
            self._pinned = torch.empty(shape, dtype=torch.int32, pin_memory=True)
            self._pairs = torch.empty(shape, dtype=torch.int32, device=device)

    def begin(self, pairs: Sequence[tuple[int, int]]) -> None:
        num_bytes = len(pairs) * self._block_bytes
        array = np.array(pairs, np.int32).reshape(-1, 2)
        if self._device.type == "cpu":
            begin = time.perf_counter()
            copy_blocks(torch.from_numpy(array), self._way)
            self.rates.append(num_bytes / max(time.perf_counter() - begin, 1e-9))
            self._num_untold += 1
            return
        if len(self._copies) == _MAX_COPIES:
            self.poll(waits=True)  # its pairs lie where these go
        place, size = self._num_begun % _MAX_COPIES, len(array)
        self._num_begun += 1
        on_host, on_device = self._pinned[place, :size], self._pairs[place, :size]
        on_host.copy_(torch.from_numpy(array))
        copy = _OnDevice(num_bytes)
        with torch.cuda.stream(self._stream):
            on_device.copy_(on_host, non_blocking=True)
            copy.began.record()
            copy_blocks(on_device, self._way, _CTAS)
            copy.ended.record()
        self._copies.append(copy)

    def poll(self, waits: bool = False) -> int:
        """How many have ended; with `waits`, the oldest among them if there is one."""
        self.num_ended += self._num_untold
        self._num_untold = 0
        while self._copies and (waits or self._copies[0].has_ended()):
            copy = self._copies.popleft()
            copy.ended.synchronize()
            waits = False
            self.rates.append(copy.num_bytes / max(copy.seconds(), 1e-9))
            self.num_ended += 1
        return self.num_ended


class Transfers:
    """Host memory for `num_slots` blocks, and the copies to and from it."""

    max_pairs = _MAX_PAIRS

    @torch.inference_mode()
    def __init__(self, parts: Sequence[Tensor], num_slots: int) -> None:
        """`parts` are the cache on the device: tensors whose first dimension is the block.

        Raises ConfigError if so much memory cannot be had.
        """
        device = parts[0].device
        self.num_slots = num_slots
        self.block_bytes = host_block_bytes(parts)
        self.num_bytes = num_slots * self.block_bytes
        self._is_pinned = device.type == "cuda"
        memory = _memory(self.num_bytes).view(num_slots, self.block_bytes)
        if self._is_pinned:
            _pin(memory, self)
        sizes = [part[0].nbytes for part in parts]
        ends = accumulate(map(_aligned, sizes))
        hosts = [
            memory[:, end - _aligned(size) :][:, :size]
            for size, end in zip(sizes, ends, strict=True)
        ]
        self._ways = {
            Direction.OUT: _OneWay(route(parts, hosts, device), self.block_bytes, device),
            Direction.IN: _OneWay(route(hosts, parts, device), self.block_bytes, device),
        }
        if self._is_pinned:
            torch.cuda.synchronize(device)  # the cache is being cleared
            self._try()

    def _try(self) -> None:
        """The first figures, with blocks that nobody uses yet, each to its own slot and back."""
        ways = self._ways
        num_blocks = len(ways[Direction.OUT]._way.sources[0])
        size = min(_MAX_PAIRS, num_blocks, self.num_slots, max(1, _TRIAL_BYTES // self.block_bytes))
        pairs = [(i, i) for i in range(size)]
        for _ in range(2):  # the first one loads the kernel
            for direction in Direction:
                self.begin(direction, pairs)
                self.wait()
                way = ways[direction]
                way.rates = deque([way.rates[-1]], _NUM_SAMPLES)
        for way in ways.values():
            way.num_ended = 0

    @torch.inference_mode()
    def begin(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy from blocks to slots, or from slots to blocks: up to `max_pairs` (from, to)."""
        assert 0 < len(pairs) <= self.max_pairs
        self._ways[direction].begin(pairs)

    def num_ended(self, direction: Direction) -> int:
        """How many copies of those that were begun."""
        return self._ways[direction].poll()

    def wait(self) -> None:
        """Until the oldest copy of each direction has ended."""
        for way in self._ways.values():
            way.poll(waits=True)

    def rate(self, direction: Direction) -> float | None:
        """Bytes a second, as measured lately; None before the first copy."""
        rates = self._ways[direction].rates
        return median(rates) if rates else None
