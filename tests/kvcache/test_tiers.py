"""A cache in two places: blocks that leave, stay in host memory and come back change no token.

Copies end late and in no order with the steps; until then their destinations hold nothing, and so
does every empty block: a step that reads a block too early, or a stale one, is detected.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import pytest
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words, expected
from fixtures.engine.machine import MAX_MODEL_LEN, Machine, seeds
from fixtures.engine.moving import LateMover
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from slipstream.core.batch import Batch, Sampled
from slipstream.core.prefix import PrefixIndex
from slipstream.core.window import AttentionWindow
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.host import Direction
from slipstream.kvcache.tier import HostTier
from slipstream.wire import FinishReason
from slipstream_contract.sampling import SamplingParams

# Counts of the cache, and the least share of the machine's examples in which each is above 0.
LEAST_SHARES = {
    "found_tokens:device": 0.5,
    "found_tokens:host": 0.08,
    "moved_blocks:out": 0.15,
    "moved_blocks:in": 0.08,
    "host_evicted_blocks": 0.05,
}


class Runner(CountingRunner):
    """A runner with host memory. A misread block fails the test even if the step is run again."""

    def __init__(self, num_slots: int, *args: int, window: AttentionWindow | None = None) -> None:
        super().__init__(*args, window=window)
        self.transfers = LateMover(num_slots, self._cache, [None] * self.block_size)
        self.misread: AssertionError | None = None

    def compute(self, batch: Batch, given: dict[int, bytes], late: set[int]) -> Sampled:
        try:
            return super().compute(batch, given, late)
        except AssertionError as error:
            self.misread = error
            raise

    def look(self, engine: Engine) -> None:
        """Assert between steps that nothing was misread, and poison empty blocks."""
        assert self.misread is None, repr(self.misread)
        if not self.in_flight:  # a row that means nothing may still be written
            self.poison(engine._scheduler.cache._blocks._empty)


class Tiers(Machine):
    """The engine under all that `Machine` does to it: cancels, preemption, steps that fail."""

    reached: ClassVar[Counter[str]] = Counter()  # examples in which a count was above 0

    @initialize(
        block_size=st.integers(1, 4),
        num_seqs=st.integers(1, 6),
        num_tokens=st.integers(1, 30),
        max_in_flight=st.integers(1, 2),
        window_size=st.sampled_from([0, 0, 2, 5, 12]),
        num_tables=st.sampled_from([1, 1, 2, 3]),
        seed=seeds,
    )
    def begin(
        self,
        block_size: int,
        num_seqs: int,
        num_tokens: int,
        max_in_flight: int,
        window_size: int,
        num_tables: int,
        seed: int,
    ) -> None:
        rng = random.Random(seed)  # sizes are drawn evenly, so that few examples have room for all
        num_blocks, num_slots = rng.choice([0, 0, 1, 3, 6, 30]), rng.choice([0, 3, 12, 24, 24])
        num_tables = num_tables if window_size else 1
        num_full = num_tables // 2
        num_ahead = max_in_flight * num_tokens
        is_chunked = bool(window_size) and rng.random() < 0.4
        window = AttentionWindow(window_size, 0, num_ahead, False, num_tables, num_full, is_chunked)
        super().begin(
            block_size=block_size,
            num_blocks=num_blocks,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_waiting=8,
            max_waiting_tokens=200,
            max_in_flight=max_in_flight,
            long_prompt_tokens=1024,
            is_reused=True,
            window=window,
        )
        num_blocks += num_tables * -(-MAX_MODEL_LEN // block_size)
        sizes = (num_blocks, block_size, MAX_MODEL_LEN, max_in_flight)
        self.runner = Runner(num_slots, *sizes, window=window)
        self.runner.max_tokens = num_tokens
        self.mover = self.runner.transfers
        limits = Limits(num_seqs, num_tokens, 8, 200, max_num_rows=num_seqs + 8)
        self.store = AdapterStore(self.runner.held)
        self.store.when_changed = self._publish
        options = {"clock": lambda: self.now_ns, "speculation": self.drafts}
        self.engine = Engine(limits, self.runner, Words(), **options, adapters=self.store)
        self.client = Client(self.engine)
        self.converse(seed, 8)

    def between_steps(self, rng: random.Random) -> None:
        """End a copy, if there is one, and look at what was read."""
        self.mover.end(rng.choice(list(Direction)))
        self.runner.look(self.engine)

    @rule(direction=st.sampled_from(Direction), times=st.integers(1, 3))
    def end_copies(self, direction: Direction, times: int) -> None:
        for _ in range(times):
            self.mover.end(direction)

    @rule(seconds=st.sampled_from([None, 1e-9, 1.0]))
    def measure(self, seconds: float | None) -> None:
        """Set the time of a copy, so that copying is sometimes slower than computing."""
        rate = None if seconds is None else self.mover.block_bytes / seconds
        self.mover.rates = dict.fromkeys(Direction, rate)

    @invariant()
    def nothing_is_read_that_nobody_wrote(self) -> None:
        self.runner.look(self.engine)

    def teardown(self) -> None:
        super().teardown()
        counts = self.engine._scheduler.cache.tier.counts
        self.reached.update({"examples": 1} | {name: 1 for name in counts if counts[name]})


class TestTiers(Tiers.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

    def runTest(self) -> None:  # noqa: N802
        """Run all examples, and assert that they do what they are for."""
        Tiers.reached.clear()
        super().runTest()
        reached = Tiers.reached
        shares = {name: reached[name] / reached["examples"] for name in reached}
        for name, least in LEAST_SHARES.items():
            assert shares.get(name, 0.0) >= least, (name, shares)


class Tree:
    """Conversations that branch: a prompt is an older turn, its answer, and a question."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8])
        longest = 40
        max_tokens = rng.choice([4, 16, 64])
        size = rng.choice([0, 0, 6, 20])
        num_tables = rng.choice([1, 2, 3]) if size else 1
        num_blocks = num_tables * -(-longest // block_size) + rng.randrange(8)
        sizes = (num_blocks, block_size, longest, rng.choice([1, 2]))
        tables = num_tables, num_tables // 2
        is_chunked = bool(size) and rng.random() < 0.4
        window = AttentionWindow(size, 0, 2 * max_tokens, False, *tables, is_chunked)
        self.runner = Runner(num_slots, *sizes, window=window)
        self.mover = self.runner.transfers
        limits = Limits(rng.choice([1, 3, 8]), max_tokens, 1000, 1 << 20)
        self.engine = Engine(limits, self.runner, Words())
        self.client = Client(self.engine)
        self.turns: list[list[int]] = [[]]
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}

    def run(self, num_turns: int) -> None:
        rng = self.rng
        for _ in range(num_turns):
            turn = rng.choice(self.turns[-4:] if rng.random() < 0.7 else self.turns)
            question = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
            prompt = (turn + question)[:35]
            sampling = SamplingParams(
                max_tokens=rng.randrange(1, 7), temperature=rng.choice([0.0, 1.0]), seed=1
            )
            self.asked[self.client.submit(prompt, sampling)] = (prompt, sampling)
            for _ in range(rng.randrange(6)):
                self.step()
            if rng.random() < 0.1:
                self.engine.cancel(self.client.name, rng.choice(list(self.asked)))
            if rng.random() < 0.1:  # a copy of a block takes so long
                seconds = rng.choice([1e-9, 1e-4, 1.0])
                self.mover.rates = dict.fromkeys(Direction, self.mover.block_bytes / seconds)
            if rng.random() < 0.1:
                self.runner.error = ValueError("planted")
            for (number, _), stream in list(self.client.streams.items()):
                if stream.last is not None and stream.reason is FinishReason.LENGTH:
                    self.turns.append((self.asked[number][0] + stream.token_ids)[:30])
        while self.engine.has_work:
            self.step()
        self.client.drain()

    def step(self) -> None:
        for direction in Direction:
            if self.rng.random() < 0.5:
                self.mover.end(direction)
        self.runner.look(self.engine)
        self.client.step()

    def check(self) -> None:
        self.runner.look(self.engine)
        ended = {FinishReason.CANCELLED, FinishReason.ERROR}
        for (number, index), stream in self.client.streams.items():
            prompt, sampling = self.asked[number]
            about = (self.runner.max_model_len, self.runner.window)
            text, reason = expected(prompt, sampling, index, *about)
            if stream.reason in ended:
                assert text.startswith(stream.text)
            else:
                assert (stream.text, stream.reason) == (text, reason)


@pytest.mark.parametrize(("copy_s", "is_swapped"), [(1e-12, True), (1e6, False)])
def test_preemption_swaps_where_that_is_faster(copy_s: float, is_swapped: bool) -> None:
    runner = Runner(60, 12, 4, 40, 1)
    runner.transfers.rates = dict.fromkeys(Direction, runner.transfers.block_bytes / copy_s)
    engine = Engine(Limits(3, 64), runner, Words())
    client = Client(engine)
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    prompts = [[number] * 14 for number in range(3)]
    for prompt in prompts:
        client.submit(prompt, sampling)
    while engine.has_work:
        runner.look(engine)
        client.step()
        runner.transfers.wait()
    scheduler = engine._scheduler
    assert scheduler.num_preemptions > 0
    counts = scheduler.cache.tier.counts
    assert (counts["moved_blocks:out"] > 0) == is_swapped
    assert (counts["found_tokens:host"] > 0) == is_swapped
    for number, prompt in enumerate(prompts):
        stream = client.streams[number, 0]
        assert (stream.text, stream.reason) == expected(prompt, sampling)


class BrokenMover(LateMover):
    """Copies fail when they are begun, looked at, or waited for."""

    where = ""

    def start(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        self.fail("begin")
        super().start(direction, pairs)

    def num_ended(self, direction: Direction) -> int:
        self.fail("num_ended")
        return super().num_ended(direction)

    def wait(self) -> None:
        self.fail("wait")
        super().wait()

    def fail(self, where: str) -> None:
        if self.where == where:
            raise RuntimeError("CUDA error")


@pytest.mark.parametrize("where", ["begin", "num_ended", "wait"])
def test_a_copy_that_fails_is_the_end_of_the_device(where: str) -> None:
    runner = Runner(8, 10, 4, 40, 2)
    mover = BrokenMover(8, runner._cache, [None] * 4)
    runner.transfers = mover
    engine = Engine(Limits(2, 64), runner, Words())
    client = Client(engine)
    for token in range(3):
        client.submit([token] * 20, SamplingParams(max_tokens=2, temperature=0.0))
    mover.where = where
    for _ in range(100):
        if engine.fatal is None and engine.has_work:
            client.step()
    assert str(engine.fatal) == "CUDA error"
    assert engine.step() == {}


def walk(seeds: range) -> int:
    """Blocks that came back from host memory, over all trees."""
    num_arrived = 0
    for seed in seeds:
        tree = Tree(seed, num_slots=seed % 4 * 6)
        tree.run(25)
        tree.check()
        num_arrived += tree.engine._scheduler.cache.tier.counts["found_tokens:host"]
    return num_arrived


@pytest.mark.parametrize("changes", ["it is withdrawn", "another takes its place"])
def test_what_was_copied_is_lost_if_the_block_changes_meanwhile(changes: str) -> None:
    """A sequence that shares a block on its way out fails, or writes to it alone."""
    device: list[object] = ["one", "two"]
    index = PrefixIndex(4)
    blocks = BlockManager(2, lambda: 0, lambda taken, priority: None, True)
    tier = HostTier(blocks, index, LateMover(4, device), lambda: None, lambda taken, worth: None)
    [block] = blocks.allocate(1)
    old, new = b"old digest", b"new digest"
    index.put(block, b"", old, b"\0" * 16)
    blocks.mark_cached([block])
    blocks.free([block])
    assert not tier.has_room(2)
    tier.start_copies()
    blocks.share([block])
    index.remove(block)
    blocks.uncache(block)
    if changes == "another takes its place":
        index.put(block, b"", new, b"\1" * 16)
        blocks.mark_cached([block])
    blocks.free([block])
    tier.wait()
    tier.poll()
    assert old not in tier.fetchable()
    assert new not in tier.fetchable()
    assert [*index.digests()] == ([new] if changes == "another takes its place" else [])
    assert blocks.num_cached == len(index)
    tier.check_integrity(blocks.moving)


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.rest)])
def test_trees_of_turns(count: int) -> None:
    assert walk(range(count)) > count * 5 // 3


@pytest.mark.slow
def test_a_thousand_trees_of_turns() -> None:
    assert walk(range(1000, 2000)) > 2000
