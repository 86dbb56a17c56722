"""Keep account of host memory: which cached blocks it holds, and which copies are under way.

A slot holds one block of the cache and is in one of four states:

    free        can be handed out
    leaving     a copy from a block of the device writes to it
    full        its block is found by its key; the least valuable one makes room for others
    arriving    a copy into a block of the device reads it

A slot or block is not handed out before its copy has ended. A block that is shared while it leaves
stays on the device, and its slot becomes free when the copy has ended. After arrival, the block is
on the device only. This module knows keys and numbers; a `Mover` executes the copies.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

Key = Hashable


class Direction(StrEnum):
    """The direction of a copy, seen from the device."""

    OUT = "out"
    IN = "in"


class Mover(Protocol):
    """The part that executes copies; those of one direction run one after another."""

    num_slots: int
    block_bytes: int
    max_pairs: int  # most blocks of one copy

    def start(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        """Start to copy blocks to slots, or slots to blocks: `max_pairs` pairs at most."""

    def num_ended(self, direction: Direction) -> int:
        """Return how many copies of a direction have ended so far."""

    def wait(self) -> None:
        """Wait until the oldest copy of each direction has ended."""

    def rate(self, direction: Direction) -> float | None:
        """Return the measured bytes per second; None before the first copy."""


class Worth(NamedTuple):
    """The value of a block: lower priorities are evicted first.

    `duration_ns` is how long the priority lasts after the block became idle; 0: always.
    """

    priority: int
    duration_ns: int = 0


class _Move(NamedTuple):
    """A block that is moving."""

    key: Key
    worth: Worth
    block: int
    slot: int


class _CopyQueue:
    """The moves of one direction: first those under way, then those waiting for `start_copies`."""

    def __init__(self) -> None:
        self.moves: deque[_Move] = deque()  # that have not ended
        self.num_waiting = 0  # the last of them, not started yet
        self.num_added = self.num_ended = 0  # since the start
        self.num_copies_ended = 0
        self.sizes: deque[int] = deque()  # of copies that have not ended

    def add(self, move: _Move) -> None:
        """Queue a move."""
        self.moves.append(move)
        self.num_waiting += 1
        self.num_added += 1

    def take_ended(self, num_copies: int) -> list[_Move]:
        """Remove and return the moves that have ended, given the number of copies ended so far."""
        count = sum(self.sizes.popleft() for _ in range(num_copies - self.num_copies_ended))
        self.num_copies_ended = num_copies
        self.num_ended += count
        return [self.moves.popleft() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class EndedMoves:
    """The blocks whose moves have ended."""

    left: list[int]  # blocks whose content is only in host memory now
    stayed: list[int]  # shared again while they were copied
    arrived: list[int]


class HostMemory:
    """The slots, and the copies between them and blocks of the device. O(1) a block."""

    def __init__(self, mover: Mover, when_gone: Callable[[Key], None] = lambda key: None) -> None:
        """Start empty; `when_gone` gets the key of each block that can be found here no more."""
        self._mover = mover
        self._when_gone = when_gone
        self.num_slots = mover.num_slots
        self.block_bytes = mover.block_bytes
        self.num_evicted = 0  # blocks removed to make room
        self._free = list(range(mover.num_slots - 1, -1, -1))
        # By priority: the lowest is evicted first; within it, the oldest.
        self._levels: dict[int, OrderedDict[Key, int]] = {}
        self._worths: dict[Key, Worth] = {}  # of full slots
        self._queues = {direction: _CopyQueue() for direction in Direction}
        self._leaving: set[int] = set()  # blocks
        self._arriving: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free)

    @property
    def num_full(self) -> int:
        """Number of slots whose block can be found."""
        return len(self._worths)

    @property
    def leaving(self) -> Set[int]:
        """Blocks of the device that are being copied to host memory."""
        return self._leaving

    @property
    def arriving(self) -> Set[int]:
        """Blocks of the device that are being filled from host memory."""
        return self._arriving

    @property
    def is_moving(self) -> bool:
        """Whether a copy is queued, or is not known to have ended."""
        return bool(self._leaving or self._arriving)

    def is_faster(self, compute_s: float | None, *directions: Direction) -> bool:
        """Return whether a block is copied in less time than it is computed.

        Returns True while either time is not measured: host memory was configured to be used.
        """
        rates = [self._mover.rate(direction) for direction in directions]
        copy_s = sum(self.block_bytes / rate for rate in rates if rate)
        return compute_s is None or copy_s < compute_s

    def __contains__(self, key: object) -> bool:
        return key in self._worths

    def send(self, key: Key, worth: Worth, block: int) -> bool:
        """Queue a cached block's move to host memory; False if every block there is worth more.

        The block must not be written from now on. It stays on the device until `poll` returns it as
        left.
        """
        assert block not in self._leaving
        assert block not in self._arriving
        assert key not in self._worths, "a block in both places"
        slot = self._free.pop() if self._free else self._make_room(worth.priority)
        if slot is None:
            return False
        self._leaving.add(block)
        self._queues[Direction.OUT].add(_Move(key, worth, block, slot))
        return True

    def fetch(self, key: Key, block: int) -> Worth:
        """Queue the move of the block with this key into a block of the caller's; return its worth.

        The block has arrived after `last_arrival` arrivals: see `has_arrived`.
        """
        worth = self._worths.pop(key)
        slot = self._levels[worth.priority].pop(key)
        self._when_gone(key)
        self._arriving.add(block)
        self._queues[Direction.IN].add(_Move(key, worth, block, slot))
        return worth

    @property
    def last_arrival(self) -> int:
        """The number of arrivals after which everything fetched so far has arrived."""
        return self._queues[Direction.IN].num_added

    def has_arrived(self, number: int) -> bool:
        """Return whether at least `number` blocks have arrived so far."""
        return self._queues[Direction.IN].num_ended >= number

    def discard(self, key: Key) -> None:
        """Remove the block with this key, if there is one."""
        worth = self._worths.pop(key, None)
        if worth is not None:
            self._free.append(self._levels[worth.priority].pop(key))
            self._when_gone(key)

    def start_copies(self) -> None:
        """Start the copies of all queued moves."""
        for direction, queue in self._queues.items():
            if not queue.num_waiting:
                continue
            moves = list(queue.moves)[-queue.num_waiting :]
            for first in range(0, len(moves), self._mover.max_pairs):
                part = moves[first : first + self._mover.max_pairs]
                if direction is Direction.OUT:
                    pairs = [(move.block, move.slot) for move in part]
                else:
                    pairs = [(move.slot, move.block) for move in part]
                self._mover.start(direction, pairs)
                queue.sizes.append(len(part))
                queue.num_waiting -= len(part)

    def poll(self, is_left: Callable[[int, Key], bool]) -> EndedMoves:
        """Return the moves that ended since the last call.

        `is_left`: of a block that moved out and its key, whether what was copied is to be kept.
        """
        ended = EndedMoves([], [], [])
        for move in self._take_ended(Direction.OUT):
            self._leaving.remove(move.block)
            if is_left(move.block, move.key):
                level = self._levels.setdefault(move.worth.priority, OrderedDict())
                level[move.key] = move.slot
                self._worths[move.key] = move.worth
                ended.left.append(move.block)
            else:
                self._free.append(move.slot)
                ended.stayed.append(move.block)
        for move in self._take_ended(Direction.IN):
            self._arriving.remove(move.block)
            self._free.append(move.slot)
            ended.arrived.append(move.block)
        return ended

    def wait(self) -> None:
        """Wait until a copy has ended, if any is under way."""
        self._mover.wait()

    def check_integrity(self) -> None:
        """Assert that every slot is in exactly one state. O(slots)."""
        full = [slot for level in self._levels.values() for slot in level.values()]
        moving = [move.slot for queue in self._queues.values() for move in queue.moves]
        slots = sorted([*self._free, *full, *moving])
        assert slots == list(range(self.num_slots)), "a slot is lost or taken twice"
        keys = {key: priority for priority, level in self._levels.items() for key in level}
        worths = {key: worth.priority for key, worth in self._worths.items()}
        assert keys == worths, "a key without a slot"
        for direction, blocks in ((Direction.OUT, self._leaving), (Direction.IN, self._arriving)):
            moves = self._queues[direction].moves
            assert sorted(move.block for move in moves) == sorted(blocks)
        assert not self._leaving & self._arriving, "a block leaves and arrives"

    def _take_ended(self, direction: Direction) -> list[_Move]:
        queue = self._queues[direction]
        return queue.take_ended(self._mover.num_ended(direction)) if queue.sizes else []

    def _make_room(self, priority: int) -> int | None:
        """Remove the least valuable block, if worth at most `priority`; return its slot or None."""
        lowest = min((p for p, level in self._levels.items() if level), default=None)
        if lowest is None or lowest > priority:
            return None
        key, slot = self._levels[lowest].popitem(last=False)
        del self._worths[key]
        self._when_gone(key)
        self.num_evicted += 1
        return slot
