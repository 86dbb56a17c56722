"""The journal of first tokens: its parts are the whole wait, and each is where it belongs."""

import json

import pytest
from fixtures.engine.client import Client
from fixtures.engine.hashed import Words
from fixtures.engine.timed import CPU, H200, TimedRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.engine.engine import Engine
from slipstream.engine.reports import describe
from slipstream.engine.scheduler import Limits
from slipstream.engine.telemetry import Telemetry
from slipstream.figures import FIRST_TOKEN_PARTS
from slipstream_contract.sampling import SamplingParams


class Clocked:
    """An engine over simulated steps, and what its requests waited for."""

    def __init__(self, costs=H200, max_num_seqs: int = 64) -> None:
        self.runner = TimedRunner(costs)
        self.telemetry = Telemetry()
        limits = Limits(max_num_seqs, 1024, kv_cache_reuse=False)
        clock = self.runner.clock
        engine = Engine(limits, self.runner, Words(), clock=clock, telemetry=self.telemetry)
        self.client = Client(engine)
        self.first_ns: dict[int, int] = {}
        self.queued_ns: dict[int, int] = {}
        self.requests = {}

    def ask(self, num_tokens: int, max_tokens: int) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        number = self.client.submit([7] * num_tokens, sampling)
        self.queued_ns[number] = self.runner.now_ns
        self.requests[number] = self.client.engine._requests[self.client.name, number]
        return number

    def step(self) -> None:
        for tokens in self.client.engine.step().get(self.client.name, ()):
            self.client.streams[tokens.request, tokens.index].take(tokens)
            if tokens.token_ids:
                self.first_ns.setdefault(tokens.request, self.runner.now_ns)

    def drain(self) -> None:
        while self.client.engine.has_work:
            self.step()

    def parts(self, number: int) -> dict[str, float]:
        line = describe(self.requests[number], self.telemetry, 0)
        return json.loads(json.dumps(line))["first_token_wait_s"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.integers(1, 20), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([H200, CPU]),
    st.sampled_from([2, 64]),
)
def test_the_parts_are_the_whole_wait(requests, costs, max_num_seqs):
    clocked = Clocked(costs, max_num_seqs)
    for num_tokens, max_tokens, num_steps in requests:
        clocked.ask(num_tokens, max_tokens)
        for _ in range(num_steps):
            if clocked.client.engine.has_work:
                clocked.step()
    clocked.drain()
    sums = dict.fromkeys(FIRST_TOKEN_PARTS, 0.0)
    for number, first_ns in clocked.first_ns.items():
        parts = clocked.parts(number)
        assert tuple(parts) == FIRST_TOKEN_PARTS
        assert min(parts.values()) >= 0
        whole = sum(parts.values()) - parts["received"]
        waited_ns = first_ns - clocked.queued_ns[number]
        assert whole * 1e9 == pytest.approx(waited_ns, rel=1e-6, abs=10_000)
        sums = {name: sums[name] + parts[name] for name in parts}
    counters = clocked.telemetry.counters
    for name, seconds in sums.items():
        assert counters[f"first_token_wait_s:{name}"] == pytest.approx(seconds, abs=1e-4)


def test_each_part_is_where_it_belongs():
    clocked = Clocked(max_num_seqs=3)
    stream = clocked.ask(700, 300)
    for _ in range(30):
        clocked.step()
    alone = clocked.parts(stream)
    assert alone["own_chunks"] == pytest.approx(700 * H200.token / 1e3 + 0.0037, rel=0.01)
    assert alone["other_prompts"] == alone["streams"] == 0
    big = clocked.ask(1000, 30)
    small = clocked.ask(16, 30)
    late = clocked.ask(16, 1)  # has no slot until one ends
    clocked.step()
    while late not in clocked.first_ns:
        clocked.step()
    parts = clocked.parts(small)
    assert parts["other_prompts"] > 20 * parts["own_chunks"] > 0
    assert parts["streams"] == pytest.approx(0.0037 + 21e-6, rel=0.02)
    assert 0 < parts["step_before"] + parts["queue"] < 0.008
    assert clocked.parts(big)["own_chunks"] > clocked.parts(big)["streams"]
    assert clocked.parts(late)["queue"] > 0.1
    assert clocked.parts(late)["queue"] < (clocked.runner.now_ns - clocked.queued_ns[late]) / 1e9


def test_a_request_without_a_token_waited_for_nothing():
    clocked = Clocked()
    number = clocked.ask(900, 5)
    clocked.client.engine.cancel(clocked.client.name, number)
    assert clocked.parts(number) is None
