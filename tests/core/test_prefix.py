"""Digests, the closest block and retention priorities, each against a plain implementation."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slipstream.core import prefix
from slipstream.core.prefix import DigestChain, PrefixIndex, split
from slipstream.kvcache.retention import IdleBlocks
from slipstream_contract.ids import pack
from slipstream_contract.retention import DEFAULT_RETENTION

SIZE = 3
SEGMENT = prefix.SEGMENT = 2  # blocks, so that short prompts have some
tokens = st.lists(st.integers(0, 2), max_size=12)


@given(tokens, tokens, st.integers(0, 12))
def test_a_digest_is_of_all_tokens_before_it(one: list[int], other: list[int], begun: int) -> None:
    index = PrefixIndex(SIZE)
    first, second = index.chain(""), index.chain("")
    extend(first, one[:begun])  # by steps or at once
    extend(first, one)
    extend(second, other)
    assert len(first.digests) == len(one) // SIZE + 1
    for i, (a, b) in enumerate(zip(first.digests, second.digests, strict=False)):
        assert (a == b) == (one[: i * SIZE] == other[: i * SIZE])
    copied = first.copy()
    extend(copied, [*one, 2, 2, 2])
    assert copied.digests[: len(first.digests)] == first.digests
    assert len(copied.digests) == len(first.digests) + 1
    assert first.num_blocks == len(one) // SIZE


def extend(chain: DigestChain, token_ids: list[int]) -> None:
    """Digest those whole blocks of `token_ids` that the chain does not have yet."""
    begin, end = chain.num_blocks * SIZE, len(token_ids) // SIZE * SIZE
    chain.extend(pack(token_ids[begin:end]).tobytes())


@settings(deadline=None)
@given(st.data())
def test_digests_of_segments_that_are_known_are_those_of_their_blocks(data: st.DataObject) -> None:
    index = PrefixIndex(SIZE)
    length = SIZE * SEGMENT
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=2 * length, max_size=5 * length))
    whole = index.chain("")
    extend(whole, prompt)
    places = st.integers(0, whole.num_blocks)
    blocks = list(split(pack(prompt).tobytes()[: whole.num_blocks * SIZE * 4], SIZE))
    for i, tokens in enumerate(blocks):
        index.put(i, whole.digests[i], whole.digests[i + 1], tokens)
    for begin, end in data.draw(st.lists(st.tuples(places, places), max_size=3)):
        index.add_segments(whole.digests, range(begin, end))
    for block in data.draw(st.sets(places.filter(lambda i: i < len(blocks)), max_size=3)):
        index.remove(block)
    index.check_integrity(set(range(len(blocks))) & index._contents.keys())
    other = list(prompt)
    place = data.draw(st.integers(0, len(prompt) - 1))
    other[place] += 1
    for borders in (data.draw(st.lists(st.integers(0, len(prompt)), max_size=3)), []):
        again, differing = index.chain(""), index.chain("")
        for end in (*sorted(borders), len(prompt)):
            extend(again, prompt[:end])
            extend(differing, other[:end])
        assert again.digests == whole.digests
        same = place // SIZE + 1
        assert differing.digests[:same] == whole.digests[:same]
        assert not set(differing.digests[same:]) & set(whole.digests)


def test_salts_and_engines_share_no_digest() -> None:
    chains = [PrefixIndex(SIZE).chain(""), PrefixIndex(SIZE).chain("")]
    index = PrefixIndex(SIZE)
    chains += [index.chain(salt) for salt in ("", "a", "b", "a\0\0\0\1\0\0\0")]
    for chain in chains:
        extend(chain, [1, 0, 1, 1, 1, 1])
    digests = [digest for chain in chains for digest in chain.digests]
    assert len(set(digests)) == len(digests) == 18
    assert {len(digest) for digest in digests} == {16}


class Known(RuleBasedStateMachine):
    """Blocks that hold the tokens after a prefix, against a dictionary of them."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(SIZE)
        self.held: dict[int, tuple[list[int], int]] = {}  # block -> tokens, of them before it

    @rule(block=st.integers(0, 9), token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def put(self, block: int, token_ids: list[int]) -> None:
        begin = (len(token_ids) - 1) // SIZE * SIZE
        chain = self.index.chain("")
        extend(chain, token_ids)
        parent, rest = chain.digests[begin // SIZE], token_ids[begin:]
        digest = chain.digests[-1] if len(rest) == SIZE else None
        if digest is not None and self.index.find(digest) is not None:
            return
        self.index.put(block, parent, digest, pack(rest).tobytes())
        self.held[block] = (token_ids, begin)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.index.remove(block)
        del self.held[block]

    @rule(token_ids=st.lists(st.integers(0, 2), max_size=11))
    def look(self, token_ids: list[int]) -> None:
        begin = len(token_ids) // SIZE * SIZE
        chain = self.index.chain("")
        extend(chain, token_ids)
        rest = token_ids[begin:]
        block, count = self.index.closest(chain.digests[-1], pack(rest).tobytes())
        counts = {
            other: num_common(held[held_begin:], rest)
            for other, (held, held_begin) in self.held.items()
            if held[:held_begin] == token_ids[:begin]
        }
        assert count == max(counts.values(), default=0)
        assert block == -1 if not count else counts[block] == count
        whole = [b for b, (held, _) in self.held.items() if held == token_ids[:begin] and held]
        assert [self.index.find(chain.digests[-1])] == (whole or [None])

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity(self.held)


def num_common(one: list[int], other: list[int]) -> int:
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return size


TestKnown = Known.TestCase
TestKnown.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Idle(RuleBasedStateMachine):
    """Idle blocks against a list of (priority, since when, block)."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1
        self.idle = IdleBlocks(lambda: self.now_ns)
        self.worth: dict[int, tuple[int, int]] = {}  # priority, ns
        self.since: dict[int, tuple[int, int]] = {}  # when it became idle: time, order
        self.order = 0
        self.ended: set[int] = set()  # a look has taken the priority of these

    def rank(self, block: int) -> tuple[int, tuple[int, int]]:
        priority, duration_ns = self.worth.get(block, (DEFAULT_RETENTION, 0))
        since = self.since[block]
        end_ns = since[0] + duration_ns
        if duration_ns and end_ns <= self.now_ns:
            return DEFAULT_RETENTION, (end_ns, since[1])
        return priority, since

    @rule(
        block=st.integers(0, 7),
        priority=st.sampled_from([0, 34, 35, 36, 100]),
        ns=st.integers(0, 9),
    )
    def retain(self, block: int, priority: int, ns: int) -> None:
        if block not in self.since:
            self.idle.retain(block, priority, ns)
            self.worth[block] = (priority, ns if priority != DEFAULT_RETENTION else 0)

    @rule(block=st.integers(0, 7))
    def add(self, block: int) -> None:
        if block not in self.since:
            self.idle.add([block])
            self.now_ns += 1  # no two at the same time: who is first then is not said
            self.order += 1
            self.since[block] = (self.now_ns - 1, self.order)

    @rule(block=st.integers(0, 7))
    def use(self, block: int) -> None:
        if block in self.since:
            self.idle.remove([block])
            del self.since[block]
            if block in self.ended:
                self.ended.remove(block)
                self.worth.pop(block, None)

    @rule(block=st.integers(0, 7))
    def forget(self, block: int) -> None:
        self.idle.discard(block)
        self.since.pop(block, None)
        self.worth.pop(block, None)
        self.ended.discard(block)

    @precondition(lambda self: self.since)
    @rule()
    def pop(self) -> None:
        ranks = {block: self.rank(block) for block in self.since}
        self.ended |= {b for b in ranks if b in self.worth and ranks[b][1] != self.since[b]}
        ((block,), priority) = next(self.idle.pop(1))
        lowest = min(rank[0] for rank in ranks.values())
        assert (priority, ranks[block][0]) == (lowest, lowest)
        never_ended = [b for b in ranks if ranks[b][0] == lowest and ranks[b][1] == self.since[b]]
        if block in never_ended:  # of those that ended, the order is that of a look
            assert ranks[block] == min(ranks[b] for b in never_ended)
        del self.since[block]
        self.worth.pop(block, None)
        self.ended.discard(block)

    @rule(ns=st.integers(1, 5))
    def wait(self, ns: int) -> None:
        self.now_ns += ns

    @invariant()
    def is_sound(self) -> None:
        self.idle.check_integrity()
        assert len(self.idle) == len(self.since)
        assert all((block in self.idle) == (block in self.since) for block in range(8))


TestIdle = Idle.TestCase
TestIdle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_heap_of_ends_does_not_grow_with_use() -> None:
    idle = IdleBlocks(lambda: 1)
    idle.retain(5, 90, 10**12)
    for _ in range(10_000):
        idle.add([5])
        idle.remove([5])
    assert len(idle._ends) < 200


@pytest.mark.parametrize("ns", [10, 0])
def test_a_priority_ends_after_its_time_and_counts_anew_with_every_use(ns: int) -> None:
    now_ns = 0
    idle = IdleBlocks(lambda: now_ns)
    for block in (1, 2, 3):
        idle.retain(block, 100 if block == 2 else DEFAULT_RETENTION, ns)
        idle.add([block])
    now_ns = 9
    idle.remove([2])
    idle.add([2])
    now_ns = 18
    assert list(idle.pop(1)) == [([1], DEFAULT_RETENTION)]
    now_ns = 19
    idle.add([1])
    order = [(block, priority) for (block,), priority in (next(idle.pop(1)) for _ in range(3))]
    if ns:  # its time was over at 19, when somebody looked: after block 1 had come
        assert order == [(3, 35), (1, 35), (2, 35)]
    else:
        assert order == [(3, 35), (1, 35), (2, 100)]
    assert all(a[1] <= b[1] for a, b in pairwise(order))
