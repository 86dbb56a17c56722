"""A pool that is smaller than its adapters: none waits for ever, and others go on meanwhile."""

import json
from collections import Counter
from pathlib import Path

import pytest
from fixtures.engine.checks import samplings
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import Words
from fixtures.engine.machine import Reloads, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from slipstream.engine.adapter_room import MAX_PASSED
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.reports import RequestLog
from slipstream.engine.scheduler import Limits
from slipstream.engine.telemetry import Telemetry
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams

PAGES = 3
BIG = 2  # it takes all pages
SMALL = (3, 6, 9, 12)  # a page each


class Crowd:
    """An engine to which requests of many adapters come."""

    def __init__(self, delay: int) -> None:
        self.runner = CountingRunner(400, 4, 24)
        self.runner.held.delay = delay
        self.runner.held.num_pages = PAGES
        self.store = AdapterStore(self.runner.held)
        options = {"clock": lambda: self.now_ns, "adapters": self.store}
        self.now_ns = 1_000_000_000
        self.engine = Engine(Limits(40, 200), self.runner, Words(), **options)
        self.client = Client(self.engine)
        for content in (BIG, *SMALL):
            self.store.load(str(content), str(content))

    def submit(self, content: int, num_tokens: int) -> int:
        """Ask for so many tokens with an adapter, or with none."""
        self.client.adapter = str(content) if content else ""
        self.client.content = content
        sampling = SamplingParams(max_tokens=num_tokens)
        return self.client.submit([content, 1, 2], sampling)

    def step(self) -> None:
        self.now_ns += 1_000_000
        self.client.step()

    def started(self) -> set[int]:
        """The requests that run."""
        return {s.request.number for s in self.engine._scheduler.running.values()}


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(SMALL), st.integers(4, 20)), min_size=1, max_size=12),
    st.integers(0, 4),
)
def test_one_that_needs_the_whole_pool_is_passed_so_often_and_no_more(
    stream: list[tuple[int, int]], delay: int
) -> None:
    """Requests whose adapters are there never stop to come, and overlap; those of none pass."""
    crowd, arrived = Crowd(delay), 0

    def step() -> set[int]:
        nonlocal arrived
        before = crowd.started()
        for _ in range(2):
            crowd.submit(*stream[arrived % len(stream)])
            arrived += 1
        crowd.step()
        return crowd.started() - before

    for _ in range(6):
        step()
    big = crowd.submit(BIG, 1)
    passed, plain = 0, set[int]()
    for _ in range(120):
        own, is_first = crowd.submit(0, 2), crowd.store.room._first == 1
        new = step()
        assert own in new, "a request of no adapter waits for one"
        plain.add(own)
        if big in new or crowd.client.streams[big, 0].last is not None:
            break
        passed += len(new - plain) * is_first
    else:
        raise AssertionError("it waits for ever")
    assert passed <= MAX_PASSED + PAGES  # those that are reserved start, too
    crowd.engine.cancel_bridge(crowd.client.name)
    crowd.client.drain()


def test_others_go_on_while_an_adapter_is_loaded() -> None:
    crowd = Crowd(delay=5)
    first, base = crowd.submit(3, 4), crowd.submit(0, 20)
    for _ in range(4):
        crowd.step()
        assert crowd.started() == {base}
    assert len(crowd.client.streams[base, 0].token_ids) > 1
    while not crowd.client.streams[first, 0].token_ids:
        crowd.step()
    crowd.client.drain()
    counts = crowd.engine.figures().counters
    assert (counts["adapter_loads"], counts["adapter_evictions"]) == (1, 0)


def test_the_request_log_counts_by_adapter(tmp_path: Path) -> None:
    crowd = Crowd(delay=1)
    crowd.engine._request_log = RequestLog(tmp_path / "log", Telemetry())
    for content in (3, 0, 6, 3):
        crowd.submit(content, 2)
    crowd.client.drain()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    names = Counter(line["lora_name"] for line in lines)
    assert names == {"3": 2, "": 1, "6": 1}
    digests = {line["lora_name"]: line["adapter"] for line in lines}
    assert digests == {"3": f"{3:032x}", "": None, "6": f"{6:032x}"}


def test_an_adapter_that_never_fits_is_refused_by_name_and_pages() -> None:
    crowd = Crowd(delay=0)
    crowd.runner.held.num_pages = PAGES - 1
    with pytest.raises(ContractError, match=r"adapter 'large' takes 3 pages of 2"):
        crowd.store.load("large", "5")
    assert len(crowd.runner.held.stored) == len(SMALL) + 1


class Storm(Reloads):
    """Many more adapters than there is room for, some asked for much more often than others."""

    @rule(
        prompt=prompts,
        draws=st.lists(st.floats(0.02, 1), min_size=3, max_size=9),
        sampling=samplings(),
        times=st.integers(0, 2),
    )
    def storm(
        self, prompt: list[int], draws: list[float], sampling: SamplingParams, times: int
    ) -> None:
        """Submit a prompt with adapters chosen by Zipf's law: of n, one in n asks."""
        for draw in draws:
            content = 3 + int(1 / draw)
            if self.adapters.get(f"s{content}") != content:
                self.load(f"s{content}", content)
            self.ask_with(f"s{content}")
            self.submit(prompt, sampling, 0, 0, "", None)
            self.step(times)

    @rule(number=st.integers(4, 20))
    def unload_one(self, number: int) -> None:
        self.unload(f"s{number}")


TestStorm = pytest.mark.rest(Storm.TestCase)
TestStorm.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
