"""The block manager with random owners, sharers and steps in flight, against a model of sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slipstream.kvcache.blocks import BlockManager

NUM_BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Owners hold lists of blocks; launched steps may touch all that was owned when they began."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.owned: list[list[int]] = []
        self.in_flight: list[set[int]] = []

    @rule(num_blocks=st.integers(1, 5))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > self.blocks.num_free:
            return
        taken = self.blocks.allocate(num_blocks)
        used = {block for owner in self.owned for block in owner}
        assert len(set(taken)) == num_blocks
        assert not set(taken) & used
        assert not any(set(taken) & touched for touched in self.in_flight), "the fence is broken"
        self.owned.append(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owned))
        part = owner[: data.draw(st.integers(1, len(owner)))]
        self.blocks.share(part)
        self.owned.append(list(part))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.blocks.free(owner)

    @precondition(lambda self: len(self.in_flight) < 3)
    @rule()
    def launch(self) -> None:
        self.in_flight.append({block for owner in self.owned for block in owner})
        self.blocks.launch()

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self) -> None:
        self.in_flight.pop(0)
        self.blocks.complete()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.blocks.check_integrity(self.owned)
        used = {block for owner in self.owned for block in owner}
        assert self.blocks.num_free + self.blocks.num_fenced + len(used) == NUM_BLOCKS
        if not self.in_flight:
            assert self.blocks.num_fenced == 0

    def teardown(self) -> None:
        for owner in self.owned:
            self.blocks.free(owner)
        for _ in self.in_flight:
            self.blocks.complete()
        assert self.blocks.num_free == NUM_BLOCKS


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_impossible_calls_are_caught() -> None:
    blocks = BlockManager(2)
    taken = blocks.allocate(2)
    with pytest.raises(AssertionError, match="beyond"):
        blocks.allocate(1)
    blocks.free(taken)
    with pytest.raises(AssertionError, match="double free"):
        blocks.free(taken)
    with pytest.raises(AssertionError, match="without an owner"):
        blocks.share(taken)
    with pytest.raises(AssertionError, match="never launched"):
        blocks.complete()


def test_integrity_sees_a_lost_block_and_a_forgotten_reference() -> None:
    blocks = BlockManager(3)
    taken = blocks.allocate(2)
    with pytest.raises(AssertionError, match="references differ"):
        blocks.check_integrity([taken[:1]])
    blocks._empty.pop()
    with pytest.raises(AssertionError, match="lost"):
        blocks.check_integrity([taken])
