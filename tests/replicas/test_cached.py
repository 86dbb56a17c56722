"""What a router finds of prompts in the caches of replicas, beside the index of an engine."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream import wire
from slipstream.core.prefix import PrefixIndex
from slipstream.replicas.cached import CachedPrefixes, PromptDigests, num_cached
from slipstream_contract.ids import TokenIds

SIZE = 4
KEY = bytes(range(32))
tokens = st.lists(st.integers(0, 2), max_size=90)


def packed(ids) -> bytes:
    return TokenIds("i", ids).tobytes()


class Engine:
    """An index that computes prompts and evicts blocks, and publishes both."""

    def __init__(self, key: bytes = KEY) -> None:
        self.index = PrefixIndex(SIZE)
        self.blocks: dict[bytes, int] = {}
        self.seen = CachedPrefixes()
        self.next = 0
        self.publish(self.index.share(key), [], is_whole=True)

    def publish(self, added, removed, is_whole=False) -> None:
        message = wire.Prefixes(self.index.key, SIZE, is_whole, added, removed)
        self.seen.take(wire.decode_bridge(wire.encode(message)))

    def chain(self, ids, salt=""):
        chain = self.index.chain(salt)
        chain.extend(packed(ids[: len(ids) // SIZE * SIZE]))
        return chain.digests

    def compute(self, ids, salt="") -> None:
        digests = self.chain(ids, salt)
        for i, digest in enumerate(digests[1:]):
            if self.index.find(digest) is None:
                content = packed(ids[i * SIZE : (i + 1) * SIZE])
                self.index.put(self.next, digests[i], digest, content)
                self.next += 1

    def evict(self, place: int) -> None:
        found = list(self.index.digests())
        if found:
            self.index.remove(self.index.find(found[place % len(found)]))

    def num_known(self, ids, salt="") -> int:
        count = 0
        for digest in self.chain(ids, salt)[1:]:
            if self.index.find(digest) is None:
                break
            count += SIZE
        return count


acts = st.lists(st.one_of(tokens, st.integers(0, 50)), max_size=8)


@given(st.lists(acts, min_size=1, max_size=3), tokens, st.sampled_from(["", "tenant"]))
def test_a_router_finds_what_each_engine_would(works, prompt, salt):
    engines = {number: Engine() for number in range(len(works))}
    for number, work in enumerate(works):
        for act in work:
            if isinstance(act, int):
                engines[number].evict(act)
            else:
                engines[number].compute(act)
            if len(work) % 2:  # else all at once
                engines[number].publish(*engines[number].index.take_news())
        engines[number].publish(*engines[number].index.take_news())
    found = num_cached(
        {n: each.seen for n, each in engines.items()}, PromptDigests(packed(prompt), salt, b"")
    )
    assert found == {n: each.num_known(prompt, salt) for n, each in engines.items()}


def test_an_evicted_block_ends_what_is_found():
    ids = list(range(40))
    engine = Engine()
    engine.compute(ids)
    engine.publish(*engine.index.take_news())
    engine.evict(3)
    engine.publish(*engine.index.take_news())
    assert num_cached({0: engine.seen}, PromptDigests(packed(ids), "", b"")) == {0: 3 * SIZE}
    assert len(engine.seen) == 9
    engine.seen.clear()
    assert num_cached({0: engine.seen}, PromptDigests(packed(ids), "", b"")) == {0: 0}


def test_a_prompt_that_is_sent_counts_until_it_is_settled():
    ids = list(range(12))
    engine = Engine()
    assert engine.seen.expect(PromptDigests(packed(ids), "", b"")) == []  # it may not reuse any
    engine.compute(list(range(20, 24)))
    engine.publish(*engine.index.take_news())
    both = [engine.seen.expect(PromptDigests(packed(ids), "", b"")) for _ in range(2)]
    for digests in both:
        assert num_cached({0: engine.seen}, PromptDigests(packed(ids), "", b"")) == {0: 12}
        engine.seen.settle(digests)
    assert num_cached({0: engine.seen}, PromptDigests(packed(ids), "", b"")) == {0: 0}


def test_engines_that_keep_their_keys_are_found_too():
    ids = list(range(40))
    one, other = Engine(), Engine(bytes(32))
    one.compute(ids)
    other.compute(ids[:12])
    for each in (one, other):
        each.publish(*each.index.take_news())
    assert one.index.key != other.index.key
    seen = {0: one.seen, 1: other.seen, 2: CachedPrefixes()}
    assert num_cached(seen, PromptDigests(packed(ids), "", b"")) == {0: 40, 1: 12, 2: 0}
    assert num_cached(seen, PromptDigests(packed(ids), "", b"adapter")) == {0: 0, 1: 0, 2: 0}


def test_an_index_that_holds_something_keeps_its_key():
    engine = Engine()
    engine.compute(list(range(8)))
    assert len(engine.index.share(bytes(32))) == 2
    assert engine.index.key == KEY
    engine.index.stop_sharing()
    engine.compute(list(range(20)))
    assert engine.index.take_news() == ([], [])
