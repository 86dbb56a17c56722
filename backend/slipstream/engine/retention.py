"""Idle blocks that hold what may be asked for again: which of them goes first?

The one of the lowest priority, and among those the one that has been idle for longest. A priority
may last for a time only, counted from when the block became idle; then it is the usual one, as if
the block had become idle just then (TensorRT-LLM's rules).
"""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from slipstream_contract.limits import MAX_RETENTION
from slipstream_contract.retention import DEFAULT_RETENTION

_MIN_STALE = 64


class IdleBlocks:
    """Every operation is O(1) a block, for those whose priority ends O(log of their number)."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` is in ns."""
        self._clock = clock
        self._levels: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(MAX_RETENTION + 1)
        ]
        self._used = 0  # bit p: there are blocks of priority p
        self._size = 0
        self._retained: dict[int, tuple[int, int]] = {}  # block -> (priority, ns; 0: for ever)
        self._ends: list[tuple[int, int]] = []  # heap of (when, block)
        self._end_of: dict[int, int] = {}  # idle block -> when; what the heap says else is stale

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return block in self._levels[self._priority(block)]

    def _priority(self, block: int) -> int:
        return self._retained[block][0] if block in self._retained else DEFAULT_RETENTION

    def retain(self, block: int, priority: int, duration_ns: int) -> None:
        """How much a block is worth that is not idle, from now on."""
        assert block not in self, "an idle block"
        if priority == DEFAULT_RETENTION:
            self._retained.pop(block, None)
        else:
            self._retained[block] = (priority, duration_ns)

    def add(self, block: int) -> None:
        """It becomes idle."""
        retained = self._retained.get(block)
        if retained is None:
            self._add(block, DEFAULT_RETENTION)
            return
        priority, duration_ns = retained
        self._add(block, priority)
        if duration_ns:
            self._end_of[block] = self._clock() + duration_ns
            heappush(self._ends, (self._end_of[block], block))
            if len(self._ends) > 2 * len(self._end_of) + _MIN_STALE:
                self._ends = [(when, block) for block, when in self._end_of.items()]
                heapify(self._ends)

    def remove(self, block: int) -> None:
        """It is used again."""
        retained = self._retained.get(block)
        if retained is None:
            self._remove(block, DEFAULT_RETENTION)
        else:
            self._remove(block, retained[0])
            self._end_of.pop(block, None)

    def take(self) -> tuple[int, int, int]:
        """The first to go is idle no more; with its priority, and for how many ns it has that."""
        self._refresh()
        priority = (self._used & -self._used).bit_length() - 1
        block = next(iter(self._levels[priority]))
        self.remove(block)
        duration_ns = self._retained[block][1] if block in self._retained else 0
        return block, priority, duration_ns

    def pop(self) -> tuple[int, int]:
        """The first to go, and its priority; nothing is known of it any more."""
        block, priority, _ = self.take()
        self._retained.pop(block, None)
        return block, priority

    def forget(self, block: int) -> None:
        """It is worth nothing any more."""
        if block in self:
            self.remove(block)
        self._retained.pop(block, None)

    def _refresh(self) -> None:
        """Take in whose time is over."""
        if not self._ends:
            return
        now_ns = self._clock()
        while self._ends and self._ends[0][0] <= now_ns:
            when, block = heappop(self._ends)
            if self._end_of.get(block) != when:
                continue
            del self._end_of[block]
            self._remove(block, self._retained.pop(block)[0])
            self._add(block, DEFAULT_RETENTION)

    def _add(self, block: int, priority: int) -> None:
        self._levels[priority][block] = None
        self._used |= 1 << priority
        self._size += 1

    def _remove(self, block: int, priority: int) -> None:
        level = self._levels[priority]
        del level[block]
        self._size -= 1
        if not level:
            self._used &= ~(1 << priority)

    def check_integrity(self) -> None:
        """What is counted is what is there."""
        assert self._size == sum(map(len, self._levels))
        used = sum(1 << priority for priority, level in enumerate(self._levels) if level)
        assert used == self._used
        assert set(self._end_of.items()) <= {(block, when) for when, block in self._ends}
        assert all(block in self for block in self._end_of)
