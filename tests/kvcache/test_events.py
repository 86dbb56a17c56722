"""A router that follows the events of a cache knows at any time what is found in it, and where.

Prompts share beginnings, some are salted, and adapters are loaded and loaded again under their
names; blocks are evicted, leave for host memory, come back, and are withdrawn as steps fail.
"""

from collections import defaultdict
from typing import NamedTuple

from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from fixtures.engine.listening import RouterView
from fixtures.engine.moving import LateMover
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.block_events import BlockEvents
from slipstream.core.window import AttentionWindow
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.kv_events import encode
from slipstream.engine.scheduler import Limits
from slipstream.kvcache.host import Direction
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

LONGEST = 24
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


class Ask(NamedTuple):
    """A prompt, and how many steps follow its submission."""

    prompt: list[int]
    salt: str
    adapter: str
    num_steps: int
    is_failing: bool


prompts = st.builds(  # a few long beginnings, and what follows
    lambda first, size, rest: ([first] * size + rest)[: LONGEST - 4],
    st.integers(0, 3),
    st.integers(1, LONGEST),
    st.lists(st.integers(0, 1), max_size=6),
)
asks = st.builds(
    Ask,
    prompts,
    st.sampled_from(["", "", "", "tenant"]),
    st.sampled_from(["", "", "a", "b"]),
    st.integers(0, 9),
    st.sampled_from([False] * 7 + [True]),
)
loads = st.tuples(st.sampled_from("ab"), st.integers(1, 3))
rates = st.sampled_from([None, None, 1e-9])  # bytes/s; the last is slower than computing
acts = st.lists(st.one_of(asks, asks, asks, asks, loads, rates), min_size=8, max_size=30)


class House:
    """An engine with host memory, whose copies end with each step, and a router."""

    def __init__(
        self, block_size: int, num_blocks: int, num_slots: int, window: AttentionWindow
    ) -> None:
        least = window.blocks_for(-(-LONGEST // block_size), block_size)
        self.runner = CountingRunner(least + num_blocks, block_size, LONGEST, 1, window)
        self.mover = LateMover(num_slots, self.runner._cache, [None] * block_size)
        self.runner.transfers = self.mover
        self.store = AdapterStore(self.runner.held)
        self.engine = Engine(Limits(3, 12), self.runner, Words(), adapters=self.store)
        self.cache = self.engine._scheduler.cache
        self.cache._token_ns = lambda: 1.0
        self.client = Client(self.engine)
        self.events = self.engine.prefixes.events = BlockEvents()
        self.router = RouterView(block_size)
        self.has_local = window.size > 0
        self.contents: dict[str, int] = {}  # of adapters, by name
        self.names: defaultdict[bytes, set[str | None]] = defaultdict(set)  # by adapters' digests
        self.asked: dict[int, tuple[Ask, bytes]] = {}
        self.told: set[tuple[str, str | None]] = set()

    def act(self, act: Ask | tuple[str, int] | float | None) -> None:
        if isinstance(act, Ask):
            self.client.adapter = act.adapter if act.adapter in self.contents else ""
            self.client.content = self.contents.get(act.adapter, 0)
            number = self.client.submit(act.prompt, GREEDY, salt=act.salt)
            found = self.store.find(self.client.adapter) if self.client.adapter else None
            self.asked[number] = act, b"" if found is None else found.digest
            self.names[self.asked[number][1]].add(self.client.adapter or None)
            for _ in range(act.num_steps):
                self.step()
            self.runner.error = ValueError("planted") if act.is_failing else None
        elif isinstance(act, tuple):
            self.store.load(act[0], str(act[1]))
            self.contents[act[0]] = act[1]
        else:
            self.mover.rates = dict.fromkeys(Direction, act)

    def step(self) -> None:
        self.client.step()
        self.mover.wait()
        self.check()

    def check(self) -> None:
        """Compare what a router knows with what is found."""
        index = self.engine.prefixes
        while events := self.events.take(3):
            for event in self.router.take(encode(events, index.block_size, 0)).events:
                self.told.add((type(event).__name__, getattr(event, "medium", None)))
        host = self.cache.tier._host
        assert host is not None
        found = {"GPU": {*index.digests()}, "CPU": {*host._worths}}
        hashes = {place: {*map(hash_of, each)} - {-1} for place, each in found.items()}
        salted = set()
        for number, (act, digest) in self.asked.items():
            ids = [*act.prompt, *self.client.streams[number, 0].token_ids]
            chain = index.chain(act.salt, digest)
            end = len(ids) // index.block_size * index.block_size
            chain.extend(pack(ids[:end]).tobytes())
            for i, each in enumerate(map(hash_of, chain.digests[1:]), 1):
                if act.salt:
                    salted.add(each)
                elif each in hashes["GPU"] | hashes["CPU"]:
                    prefix = self.router.prefixes[each]
                    assert prefix or self.has_local  # a local table lacks what is before
                    if prefix:
                        assert prefix[1] == tuple(ids[: i * index.block_size])
                        assert prefix[0] in self.names[digest]
        assert self.router.places == {place: each - salted for place, each in hashes.items()}


def hash_of(digest: object) -> int:
    """Return the last 64 bits of a digest of the first table; -1 for that of another."""
    assert isinstance(digest, bytes)
    return int.from_bytes(digest[8:], "big") if len(digest) == 16 else -1


@given(
    acts,
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 30),
    st.sampled_from([(0, 1), (0, 1), (5, 1), (9, 2)]),
)
@settings(deadline=None)
def test_a_router_knows_what_is_found(acts, block_size, num_blocks, num_slots, local):
    size, num_tables = local
    window = AttentionWindow(size, 0, 12, False, num_tables, num_tables // 2)
    house = House(block_size, num_blocks, num_slots, window)
    for act in acts:
        house.act(act)
    house.client.drain()
    house.check()


def test_all_kinds_of_events_come():
    house = House(2, 0, 20, AttentionWindow())
    for number in range(8):
        house.act(Ask([number % 2] * 20, "", "", 60, is_failing=False))
    assert house.cache.tier.counts["found_tokens:host"] > 0
    house.act(1e-9)
    before = house.cache.tier.counts.copy()
    assert house.router.places["CPU"]
    house.act(Ask([0] * 20, "", "", 60, is_failing=False))  # is computed again
    assert not house.router.places["CPU"]
    assert house.cache.tier.counts["found_tokens:host"] == before["found_tokens:host"]
    kinds = ("BlockStored", "BlockRemoved")
    assert house.told == {(kind, place) for kind in kinds for place in ("GPU", "CPU")}
