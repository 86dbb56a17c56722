"""Slots of host memory under random sends, fetches and copies that end late, with real contents."""

import pytest
from fixtures.engine.moving import LateMover
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slipstream.kvcache.host import Direction, HostMemory, Worth

GONE = "gone"


class Memories(RuleBasedStateMachine):
    """A device of a few blocks, each free, held, cached, leaving or arriving; keys never repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.device: list[object] = [GONE] * 6
        self.mover = LateMover(4, self.device)
        self.memory = HostMemory(self.mover)
        self.free = set(range(6))
        self.cached: dict[int, int] = {}  # block -> key
        self.leaving: dict[int, int] = {}
        self.wanted: set[int] = set()  # of those that leave
        self.arriving: dict[int, tuple[int, int]] = {}  # block -> key, number
        self.away: set[int] = set()  # keys that may lie in host memory
        self.next_key = 0

    @precondition(lambda self: self.free)
    @rule()
    def compute(self) -> None:
        block = self.free.pop()
        self.device[block] = self.cached[block] = self.next_key
        self.next_key += 1

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), priority=st.integers(0, 2))
    def send(self, data: st.DataObject, priority: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        key = self.cached[block]
        if self.memory.send(key, Worth(priority, key), block):
            self.leaving[block] = self.cached.pop(block)
        else:  # it is simply lost
            del self.cached[block]
            self.release(block)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def want_again(self, data: st.DataObject) -> None:
        self.wanted.add(data.draw(st.sampled_from(sorted(self.leaving))))

    @precondition(lambda self: self.away and self.free)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.away)))
        if key not in self.memory:
            self.away.remove(key)  # it made room for another
            return
        block = self.free.pop()
        assert self.memory.fetch(key, block).duration_ns == key
        number = self.memory.last_arrival
        assert key not in self.memory
        self.away.remove(key)
        self.arriving[block] = (key, number)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.away)))
        self.memory.discard(key)
        self.away.remove(key)
        assert key not in self.memory

    @rule()
    def begin(self) -> None:
        self.memory.start_copies()

    @rule(direction=st.sampled_from(Direction))
    def end_one(self, direction: Direction) -> None:
        self.mover.end(direction)

    @rule()
    def poll(self) -> None:
        landed = self.memory.poll(lambda block, key: block not in self.wanted)
        for block in landed.left:
            assert block not in self.wanted
            self.away.add(self.leaving.pop(block))
            self.release(block)
        for block in landed.stayed:
            self.wanted.remove(block)
            self.cached[block] = self.leaving.pop(block)
        for block in landed.arrived:
            key, number = self.arriving.pop(block)
            assert self.memory.has_arrived(number)
            assert self.device[block] == key, "it is not what was sent"
            self.cached[block] = key

    def release(self, block: int) -> None:
        self.device[block] = GONE
        self.free.add(block)

    @invariant()
    def everything_is_in_one_place(self) -> None:
        self.memory.check_integrity()
        assert self.memory.leaving == self.leaving.keys()
        assert self.memory.arriving == self.arriving.keys()
        for block, key in [*self.cached.items(), *self.leaving.items()]:
            assert self.device[block] == key, "a block was written while it was the cache's"
            assert key not in self.memory, "a block in both places"
        for _, number in self.arriving.values():
            assert not self.memory.has_arrived(number), "told before it is there"

    def teardown(self) -> None:
        while self.memory.is_moving:
            self.memory.start_copies()
            self.memory.wait()
            self.poll()
        while len(self.away) and self.free:
            key = self.away.pop()
            if key in self.memory:
                self.memory.fetch(key, block := self.free.pop())
                self.arriving[block] = (key, self.memory.last_arrival)
                self.memory.start_copies()
                self.memory.wait()
                self.poll()


TestMemories = Memories.TestCase
TestMemories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def memory_of(num_slots: int) -> tuple[HostMemory, LateMover]:
    mover = LateMover(num_slots, list(range(100)))
    return HostMemory(mover), mover


def settle(memory: HostMemory) -> None:
    while memory.is_moving:
        memory.start_copies()
        memory.wait()
        memory.poll(lambda block, key: True)


def test_the_least_valuable_makes_room() -> None:
    memory, _ = memory_of(3)
    for block, priority in enumerate((5, 1, 1)):
        assert memory.send(f"k{block}", Worth(priority), block)
    settle(memory)
    assert not memory.send("low", Worth(0), 7), "all are worth more"
    assert memory.send("new", Worth(1), 3)
    assert "k1" not in memory, "the older of the two lowest goes"
    assert memory.send("high", Worth(9), 4)
    assert memory.send("higher", Worth(9), 5)
    assert not memory.send("highest", Worth(99), 6), "what is on its way is not thrown out"
    assert memory.num_evicted == 3
    settle(memory)
    assert [key in memory for key in ("k0", "k2", "new", "high", "higher")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_a_copy_is_worth_it_where_it_is_faster() -> None:
    memory, mover = memory_of(1)
    assert memory.is_faster(None, *Direction)
    assert memory.is_faster(0.01, *Direction), "nothing measured yet"
    mover.rates = {Direction.OUT: 1e4, Direction.IN: 2e4}  # 10 and 5 ms
    assert not memory.is_faster(0.014, *Direction)
    assert memory.is_faster(0.016, *Direction)
    assert memory.is_faster(0.006, Direction.IN)
    assert not memory.is_faster(0.004, Direction.IN)


def test_impossible_calls_are_caught() -> None:
    memory, _ = memory_of(2)
    memory.send("a", Worth(0), 0)
    with pytest.raises(AssertionError):
        memory.send("b", Worth(0), 0)
    settle(memory)
    with pytest.raises(AssertionError, match="both places"):
        memory.send("a", Worth(0), 1)
    with pytest.raises(KeyError):
        memory.fetch("b", 1)
    memory._free.clear()
    with pytest.raises(AssertionError, match="lost"):
        memory.check_integrity()
