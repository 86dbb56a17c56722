"""Host memory as the second place of cached blocks: what lies there, and what is on its way.

It knows keys and numbers only. A slot holds one block of the cache and is

    free        may be handed out
    leaving     a copy writes to it, out of a block of the device
    full        it is found by its key; the least valuable one makes room for others
    arriving    a copy reads it, into a block of the device

and a block that leaves or arrives is not handed out before its copy has ended. A block that is
wanted again while it leaves stays on the device: its slot is free then, once its copy has ended.
What has arrived is the device's alone.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

Key = Hashable


class Direction(StrEnum):
    """Of a copy, as the device sees it."""

    OUT = "out"
    IN = "in"


class Mover(Protocol):
    """What executes copies, those of a direction one after another."""

    num_slots: int
    block_bytes: int
    max_pairs: int  # of one copy

    def begin(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy from blocks to slots, or from slots to blocks."""

    def num_ended(self, direction: Direction) -> int:
        """How many copies of those that were begun."""

    def wait(self) -> None:
        """Until the oldest copy of each direction has ended."""

    def rate(self, direction: Direction) -> float | None:
        """Bytes a second, measured; None: not yet."""


class Worth(NamedTuple):
    """Of a block: the least goes first. A priority may last for so long only, once it is idle."""

    priority: int
    duration_ns: int = 0


class _Move(NamedTuple):
    """A block on its way."""

    key: Key
    worth: Worth
    block: int
    slot: int


class _Way:
    """The moves of one direction, in order: those that wait for `begin`, and those under way."""

    def __init__(self) -> None:
        self.moves: deque[_Move] = deque()  # that have not ended
        self.num_waiting = 0  # of them, the last
        self.num_added = self.num_ended = 0  # ever
        self.num_copies_ended = 0
        self.sizes: deque[int] = deque()  # of copies that have not ended

    def add(self, move: _Move) -> None:
        """It waits."""
        self.moves.append(move)
        self.num_waiting += 1
        self.num_added += 1

    def take_ended(self, num_copies: int) -> list[_Move]:
        """Those that have ended by now, of which so many copies ever have."""
        count = sum(self.sizes.popleft() for _ in range(num_copies - self.num_copies_ended))
        self.num_copies_ended = num_copies
        self.num_ended += count
        return [self.moves.popleft() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of moves that have ended."""

    left: list[int]  # blocks of the device whose content is in host memory now, and nowhere else
    stayed: list[int]  # that were wanted again meanwhile
    arrived: list[int]


class HostMemory:
    """The slots, and the copies between them and the device's blocks. O(1) a block."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self.num_slots = mover.num_slots
        self.block_bytes = mover.block_bytes
        self.num_evicted = 0  # blocks that made room for others
        self._free = list(range(mover.num_slots - 1, -1, -1))
        # By priority, lowest first to go; within it the one that came first.
        self._levels: dict[int, OrderedDict[Key, int]] = {}
        self._worths: dict[Key, Worth] = {}  # of full slots
        self._ways = {direction: _Way() for direction in Direction}
        self._leaving: set[int] = set()  # blocks
        self._arriving: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_full(self) -> int:
        """Slots that hold a block to be found."""
        return len(self._worths)

    @property
    def leaving(self) -> Set[int]:
        """Blocks of the device that are being copied out."""
        return self._leaving

    @property
    def arriving(self) -> Set[int]:
        """Blocks of the device that are being copied in."""
        return self._arriving

    @property
    def is_moving(self) -> bool:
        """Is any copy to be begun, or not known to have ended?"""
        return bool(self._leaving or self._arriving)

    def num_moved(self, direction: Direction) -> int:
        """Blocks whose copies have ended."""
        return self._ways[direction].num_ended

    def is_faster(self, compute_s: float | None, *directions: Direction) -> bool:
        """Is a block copied so in less time than it is computed?

        Yes, where either is not measured yet: the memory was given to be used.
        """
        rates = [self._mover.rate(direction) for direction in directions]
        copy_s = sum(self.block_bytes / rate for rate in rates if rate)
        return compute_s is None or copy_s < compute_s

    def __contains__(self, key: object) -> bool:
        return key in self._worths

    def send(self, key: Key, worth: Worth, block: int) -> bool:
        """Begin to move a cached block out; False if all that lies here is worth more.

        Nobody may write to the block any more. It stays the device's until `poll` tells that it
        has left.
        """
        assert block not in self._leaving
        assert block not in self._arriving
        assert key not in self._worths, "a block in both places"
        slot = self._free.pop() if self._free else self._make_room(worth.priority)
        if slot is None:
            return False
        self._leaving.add(block)
        self._ways[Direction.OUT].add(_Move(key, worth, block, slot))
        return True

    def fetch(self, key: Key, block: int) -> Worth:
        """Begin to move what lies here into a block that nobody else touches; what it is worth.

        It is there after `last_arrival` arrivals: see `has_arrived`.
        """
        worth = self._worths.pop(key)
        slot = self._levels[worth.priority].pop(key)
        self._arriving.add(block)
        self._ways[Direction.IN].add(_Move(key, worth, block, slot))
        return worth

    @property
    def last_arrival(self) -> int:
        """The number of arrivals after which all is there that was fetched so far."""
        return self._ways[Direction.IN].num_added

    def has_arrived(self, number: int) -> bool:
        """Have so many blocks arrived, ever?"""
        return self._ways[Direction.IN].num_ended >= number

    def drop(self, key: Key) -> None:
        """Forget what lies here under a key, if anything does: the device has it, or nobody may."""
        worth = self._worths.pop(key, None)
        if worth is not None:
            self._free.append(self._levels[worth.priority].pop(key))

    def begin(self) -> None:
        """Begin the copies of all that was sent and fetched since the last time."""
        for direction, way in self._ways.items():
            if not way.num_waiting:
                continue
            moves = list(way.moves)[-way.num_waiting :]
            for first in range(0, len(moves), self._mover.max_pairs):
                part = moves[first : first + self._mover.max_pairs]
                if direction is Direction.OUT:
                    pairs = [(move.block, move.slot) for move in part]
                else:
                    pairs = [(move.slot, move.block) for move in part]
                self._mover.begin(direction, pairs)
                way.sizes.append(len(part))
                way.num_waiting -= len(part)

    def poll(self, is_wanted: Callable[[int], bool]) -> Landed:
        """What has ended since the last time. A block that left and `is_wanted` has stayed."""
        landed = Landed([], [], [])
        for move in self._take_ended(Direction.OUT):
            self._leaving.remove(move.block)
            if is_wanted(move.block):
                self._free.append(move.slot)
                landed.stayed.append(move.block)
            else:
                level = self._levels.setdefault(move.worth.priority, OrderedDict())
                level[move.key] = move.slot
                self._worths[move.key] = move.worth
                landed.left.append(move.block)
        for move in self._take_ended(Direction.IN):
            self._arriving.remove(move.block)
            self._free.append(move.slot)
            landed.arrived.append(move.block)
        return landed

    def wait(self) -> None:
        """Until some copy has ended, if any has begun."""
        self._mover.wait()

    def check_integrity(self) -> None:
        """Every slot in exactly one state. O(slots)."""
        full = [slot for level in self._levels.values() for slot in level.values()]
        moving = [move.slot for way in self._ways.values() for move in way.moves]
        slots = sorted([*self._free, *full, *moving])
        assert slots == list(range(self.num_slots)), "a slot is lost or taken twice"
        keys = {key: priority for priority, level in self._levels.items() for key in level}
        worths = {key: worth.priority for key, worth in self._worths.items()}
        assert keys == worths, "a key without a slot"
        for direction, blocks in ((Direction.OUT, self._leaving), (Direction.IN, self._arriving)):
            moves = self._ways[direction].moves
            assert sorted(move.block for move in moves) == sorted(blocks)
        assert not self._leaving & self._arriving, "a block leaves and arrives"

    def _take_ended(self, direction: Direction) -> list[_Move]:
        way = self._ways[direction]
        return way.take_ended(self._mover.num_ended(direction)) if way.sizes else []

    def _make_room(self, priority: int) -> int | None:
        """The slot of the least valuable block, if it is worth no more than `priority`."""
        lowest = min((p for p, level in self._levels.items() if level), default=None)
        if lowest is None or lowest > priority:
            return None
        key, slot = self._levels[lowest].popitem(last=False)
        del self._worths[key]
        self.num_evicted += 1
        return slot
