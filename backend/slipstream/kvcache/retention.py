"""Order idle cached blocks by which is evicted first.

The block with the lowest priority goes first; among equals, the one that has been idle longest. A
priority may have a duration, counted from when the block became idle. When it ends, the block gets
the default priority, as if it had become idle at that moment (TensorRT-LLM's rules).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from slipstream_contract.limits import MAX_RETENTION
from slipstream_contract.retention import DEFAULT_RETENTION

_MIN_STALE = 64


class IdleBlocks:
    """Idle blocks, by priority and time. O(1) a block; O(log n) for priorities that end."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """Start empty; `clock` returns ns."""
        self._clock = clock
        self._levels: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(MAX_RETENTION + 1)
        ]
        self._used = 0  # bit p: there are idle blocks of priority p
        self._size = 0
        self._retained: dict[int, tuple[int, int]] = {}  # block -> (priority, ns; 0: for ever)
        self._ends: list[tuple[int, int]] = []  # heap of (ns at which the priority ends, block)
        self._end_of: dict[int, int] = {}  # idle block -> ns; other entries of the heap are stale

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return block in self._levels[self._priority(block)]

    def _priority(self, block: int) -> int:
        return self._retained[block][0] if block in self._retained else DEFAULT_RETENTION

    def retain(self, block: int, priority: int, duration_ns: int) -> None:
        """Set the priority of a block that is not idle; a duration of 0 lasts for ever."""
        assert block not in self, "an idle block"
        if priority == DEFAULT_RETENTION:
            self._retained.pop(block, None)
        else:
            self._retained[block] = (priority, duration_ns)

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks that have become idle, one after the other."""
        usual, retained = self._levels[DEFAULT_RETENTION], self._retained
        num_before = len(usual)
        for block in blocks:
            if block in retained:
                self._add_retained(block)
            else:
                usual[block] = None
        self._count(DEFAULT_RETENTION, len(usual) - num_before)

    def _add_retained(self, block: int) -> None:
        priority, duration_ns = self._retained[block]
        self._levels[priority][block] = None
        self._count(priority, 1)
        if duration_ns:
            self._end_of[block] = self._clock() + duration_ns
            heappush(self._ends, (self._end_of[block], block))
            if len(self._ends) > 2 * len(self._end_of) + _MIN_STALE:
                self._ends = [(when, block) for block, when in self._end_of.items()]
                heapify(self._ends)

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are used again."""
        usual, retained = self._levels[DEFAULT_RETENTION], self._retained
        num_before = len(usual)
        for block in blocks:
            if block in retained:
                self._remove_retained(block)
            else:
                del usual[block]
        self._count(DEFAULT_RETENTION, len(usual) - num_before)

    def _remove_retained(self, block: int) -> None:
        priority, _ = self._retained[block]
        del self._levels[priority][block]
        self._count(priority, -1)
        self._end_of.pop(block, None)

    def _count(self, priority: int, num_more: int) -> None:
        """Count `num_more` more idle blocks of a priority; may be negative."""
        self._size += num_more
        if self._levels[priority]:
            self._used |= 1 << priority
        else:
            self._used &= ~(1 << priority)

    def take(self) -> tuple[int, int, int]:
        """Remove the first block to evict; return it, its priority and the duration in ns."""
        self._refresh()
        priority = self._lowest()
        block = next(iter(self._levels[priority]))
        self.remove([block])
        duration_ns = self._retained[block][1] if block in self._retained else 0
        return block, priority, duration_ns

    def pop(self, num_blocks: int) -> Iterator[tuple[list[int], int]]:
        """Remove the first `num_blocks` blocks to evict and their priorities; yield both."""
        assert num_blocks <= self._size
        self._refresh()
        while num_blocks:
            priority = self._lowest()
            blocks = list(islice(self._levels[priority], num_blocks))
            self.remove(blocks)
            for block in blocks if priority != DEFAULT_RETENTION else ():
                del self._retained[block]
            num_blocks -= len(blocks)
            yield blocks, priority

    def _lowest(self) -> int:
        return (self._used & -self._used).bit_length() - 1

    def discard(self, block: int) -> None:
        """Remove a block's priority, and the block itself if it is idle."""
        if block in self:
            self.remove([block])
        self._retained.pop(block, None)

    def _refresh(self) -> None:
        """Give the default priority to blocks whose priority has ended."""
        if not self._ends:
            return
        now_ns = self._clock()
        while self._ends and self._ends[0][0] <= now_ns:
            when, block = heappop(self._ends)
            if self._end_of.get(block) != when:
                continue
            self._remove_retained(block)
            del self._retained[block]
            self.add([block])

    def check_integrity(self) -> None:
        """Assert that the counts equal the contents."""
        assert self._size == sum(map(len, self._levels))
        used = sum(1 << priority for priority, level in enumerate(self._levels) if level)
        assert used == self._used
        assert set(self._end_of.items()) <= {(block, when) for when, block in self._ends}
        assert all(block in self for block in self._end_of)
