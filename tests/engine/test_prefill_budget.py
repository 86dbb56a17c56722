"""Isolation: what a long prompt does to the streams beside it, in the measured times of a GPU."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from fixtures.engine.client import Client
from fixtures.engine.hashed import Words
from fixtures.engine.timed import (
    CPU,
    DEAR_CPU,
    DEAR_H200,
    H200,
    MS,
    VERY_LONG_H200,
    Costs,
    TimedRunner,
)
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.batch import Batch
from slipstream.core.step_sizes import StepSizes
from slipstream.engine.engine import Engine
from slipstream.engine.prefill_budget import PrefillBudget
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams


class Streams:
    """Requests that decode, and the times at which their tokens were sent."""

    def __init__(self, costs: Costs, long_prompt_tokens: int | None = 1024) -> None:
        self.runner = TimedRunner(costs)
        limits = Limits(300, costs.budget, long_prompt_tokens=long_prompt_tokens)
        engine = Engine(limits, self.runner, Words(), clock=self.runner.clock)
        self.client = Client(engine)
        self.times_ns: list[int] = []
        self.watched: int | None = None

    def ask(self, num_tokens: int, max_tokens: int) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return self.client.submit([7] * num_tokens, sampling)

    def step(self) -> None:
        told = self.client.engine.step().get(self.client.name, ())
        for tokens in told:
            self.client.streams[tokens.request, tokens.index].take(tokens)
        if any(tokens.request == self.watched for tokens in told):
            self.times_ns.append(self.runner.now_ns)

    def has_begun(self, number: int) -> bool:
        return bool(self.client.streams[number, 0].token_ids)

    def gap_ms(self) -> float:
        """Return the p99 gap between tokens of the watched stream since the last call."""
        times, self.times_ns = self.times_ns, self.times_ns[-1:]
        gaps = sorted(b - a for a, b in pairwise(times))
        return gaps[len(gaps) * 99 // 100] / MS


def beside(
    costs: Costs, num_streams: int, long_prompt_tokens: int | None = 1024
) -> tuple[float, float]:
    """Return how much a long prompt delays a stream's tokens, and streams its first token."""
    streams = Streams(costs, long_prompt_tokens)
    for _ in range(num_streams):
        streams.watched = streams.ask(16, 1000)
    for _ in range(50):
        streams.step()
    streams.gap_ms()
    for _ in range(100):
        streams.step()
    usual_ms = streams.gap_ms()
    begun_ns = streams.runner.now_ns
    number = streams.ask(costs.length, 1)
    while not streams.has_begun(number):
        streams.step()
    took_ms = (streams.runner.now_ns - begun_ns) / MS
    return streams.gap_ms() / usual_ms, took_ms / costs.alone


@pytest.mark.parametrize(
    ("costs", "num_streams", "long_prompt_tokens"),
    [
        *((H200, 1, 1024), (CPU, 1, None), (H200, 8, None), (CPU, 8, 1024)),
        pytest.param(H200, 32, 1024, marks=pytest.mark.rest),
        pytest.param(CPU, 32, None, marks=pytest.mark.rest),
    ],
)
def test_a_long_prompt_at_most_doubles_the_time_to_the_next_token(
    costs, num_streams, long_prompt_tokens
):
    stretch, delay = beside(costs, num_streams, long_prompt_tokens)
    assert 1.4 < stretch <= 2.0
    assert delay < 3.5  # three sevenths of every step are the prompt's


@pytest.mark.parametrize("costs", [DEAR_H200, DEAR_CPU], ids=["H200", "CPU"])
@pytest.mark.parametrize("num_streams", quick_of([4, 16], [4]))
def test_small_chunks_and_late_ones_cost_more_a_token_and_get_fewer(costs, num_streams):
    stretch, delay = beside(costs, num_streams)
    assert 1.4 < stretch <= 2.0
    assert delay < 6


def test_many_long_prompts_are_computed_nearly_as_fast_as_without_the_rule():
    def took_ms(long_prompt_tokens: int) -> float:
        streams = Streams(H200, long_prompt_tokens)
        begun_ns = streams.runner.now_ns
        numbers = [streams.ask(6_000, 100) for _ in range(16)]
        while not all(map(streams.has_begun, numbers)):
            streams.step()
        return (streams.runner.now_ns - begun_ns) / MS

    assert took_ms(1024) < 1.3 * took_ms(10**6)


@pytest.mark.rest
def test_without_the_rule_it_would_take_the_whole_target():
    stretch, _ = beside(H200, 64, long_prompt_tokens=10**6)
    assert 4 < stretch <= 5.1


@pytest.mark.rest
def test_short_prompts_are_not_touched():
    def rows(long_prompt_tokens: int) -> list[list[tuple[int, int, int]]]:
        streams = Streams(H200, long_prompt_tokens)
        for i in range(48):
            streams.ask(128 + 897 * i // 47, 24)
        while streams.client.engine.has_work:
            streams.step()
        batches = streams.runner.batches
        return [[(r.sequence_id, r.start, len(r.token_ids)) for r in b.rows] for b in batches]

    assert rows(1024 + 24) == rows(10**6)
    assert rows(1000) != rows(10**6)


@pytest.mark.rest
def test_what_decodes_take_is_seen_anew_while_a_long_prompt_does_not_end():
    streams = Streams(H200)
    streams.watched = streams.ask(16, 5000)
    for _ in range(30):
        streams.step()
    streams.ask(79_000, 1)

    def chunk() -> int:
        return max(sum(len(row.token_ids) for row in b.rows[b.num_decodes :]) for b in last())

    def last() -> list[Batch]:
        return streams.runner.batches[-20:]

    for _ in range(40):
        streams.step()
    before = chunk()
    for _ in range(60):
        streams.ask(16, 5000)
    for _ in range(320):
        streams.step()
    assert 64 <= before < 130
    assert chunk() > 1.25 * before


class Device:
    """A `PrefillBudget` that measures a simulated device, which runs one step after the other."""

    def __init__(
        self, costs: Costs, noise: float = 0.0, seed: int = 0, doubles_at: int = 0
    ) -> None:
        self.costs = costs
        self.budget = PrefillBudget(lambda: int(self.now_ms * MS), doubles_at)
        self.now_ms = 1_000.0
        self._noise = noise
        self._random = random.Random(seed)

    def run(self, num_decodes: int, start: int = 0, num_tokens: int = 0) -> float:
        """Run a step; return how long it took."""
        self.budget.start_step(num_decodes, num_tokens)
        took = self.costs.of(num_decodes, [(start, num_tokens)] if num_tokens else [])
        took *= 1 + self._random.uniform(-self._noise, self._noise)
        self.now_ms += took
        self.budget.finish_step()
        return took

    def prompt(self, num_decodes: int) -> tuple[list[int], list[float]]:
        """Run a long prompt beside decodes; return tokens and time of each step with any."""
        sizes, times, start = [], [], 0
        while start < self.costs.length:
            num_tokens = min(self.budget.take(num_decodes, 1, start), self.costs.length - start)
            took = self.run(num_decodes, start, num_tokens)
            if num_tokens:
                sizes.append(num_tokens)
                times.append(took)
            start += num_tokens
        return sizes, times


def warm(costs: Costs, noise: float = 0.0, seed: int = 0, doubles_at: int = 0) -> Device:
    """Return a device that has run decodes, and large steps."""
    device = Device(costs, noise, seed, doubles_at)
    for _ in range(7):
        device.run(0, 0, 512)
        device.run(4)
    return device


@st.composite
def devices(draw: st.DrawFn) -> Costs:
    """Draw costs with decodes that take as long as 16 to 500 prompt tokens."""
    token = draw(st.floats(0.01, 0.5))
    decode = token * draw(st.floats(0.0, 2.0))
    step = max(0.0, token * draw(st.floats(16, 500)) - 4 * decode)
    chunk = (step + 4 * decode) * draw(st.floats(0.0, 2.0))
    growth = draw(st.floats(0.0, 2.0))
    return Costs(step, decode, token, 1, 2048, 8_192, chunk, growth)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(devices(), st.integers(0, 99))
def test_a_prompt_takes_at_most_twice_as_many_steps_as_its_tokens_are_worth(costs, seed):
    noise, usual, large = 0.2, costs.of(4, []), 512
    sizes, _ = warm(costs, noise, seed).prompt(4)
    # The most that the noise can make of a token's cost in large steps, the least of decodes.
    most = (1 + noise) * (costs.token + (costs.step + costs.chunk) / large)
    least = 0.75 * (1 - noise) * usual / (2 * most)
    assert min(sizes[:-1]) >= max(4, int(least) // 4 * 4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(devices())
def test_chunks_come_to_rest_where_they_take_their_share(costs):
    costs = replace(costs, chunk=min(costs.chunk, 0.25 * costs.of(4, [])), growth=0.0)
    sizes, times = warm(costs).prompt(4)
    usual = costs.of(4, [])
    rest = sizes[len(sizes) // 2 : -1]
    assert max(rest) - min(rest) <= 8  # they come from below, in fours
    # Less by at most the four tokens to which a chunk is rounded, and by what two steps see.
    assert max(times[20:]) <= 1.76 * usual
    assert times[len(times) // 2] >= 1.7 * usual - 8 * costs.token


@settings(max_examples=60, deadline=None, derandomize=True)
@given(devices(), st.integers(0, 99))
def test_noise_does_not_let_chunks_grow_without_bound(costs, seed):
    """With a tenth of noise in every step, and whatever the prompt's tokens come to cost."""
    costs = replace(
        costs, chunk=min(costs.chunk, 0.25 * costs.of(4, [])), growth=min(costs.growth, 0.5)
    )
    device = warm(costs, 0.1, seed)
    times = sorted(time for _ in range(3) for time in device.prompt(4)[1])
    assert times[len(times) * 99 // 100] <= 2.4 * costs.of(4, [])


def test_of_a_very_long_prompt_a_token_may_cost_more_by_all_before_it():
    usual, length = VERY_LONG_H200.of(4, []), VERY_LONG_H200.length
    told, untold = (
        warm(VERY_LONG_H200, doubles_at=doubles_at).prompt(4)[1]
        for doubles_at in (round(length / VERY_LONG_H200.growth), 0)
    )
    assert max(told[20:]) <= 1.8 * usual
    assert max(untold[20:]) > 2.5 * usual


def test_the_first_of_all_prompts_begins_with_few_tokens():
    sizes, times = Device(DEAR_CPU).prompt(4)
    assert sizes[0] == 64
    assert max(times[1:]) <= 2 * DEAR_CPU.of(4, [])
    assert len(sizes) < 400


def test_other_long_prompts_share_what_comes_with_a_chunk():
    device = warm(DEAR_H200)
    alone, _ = device.prompt(4)
    assert device.budget.take(4, 8) > 12 * alone[-2]  # late, and small: it cost much more a token


def test_a_void_step_is_not_measured():
    now_ns = 0
    budget = PrefillBudget(lambda: now_ns)
    for took in [2] * 7:
        budget.start_step(4, 0)
        now_ns += took * MS
        budget.finish_step()
    budget.start_step(0, 1000)
    now_ns += 10 * MS
    budget.finish_step()
    assert budget.take(4, 1) == 0  # the first one looks what decodes take
    assert budget.take(4, 1) == 148  # three quarters of 2 ms
    for _ in range(2):
        budget.start_step(4, 64)
    now_ns += 1000 * MS
    budget.discard_steps()
    for _ in range(3):
        budget.start_step(4, 0)
        now_ns += 2 * MS
        budget.finish_step()
    assert budget.take(4, 1) == 148


def test_only_large_steps_and_cut_ones_tell_what_a_token_costs():
    now_ns = 0
    budget = PrefillBudget(lambda: now_ns)

    def run(num_decodes: int, num_tokens: int, took: float) -> None:
        nonlocal now_ns
        budget.start_step(num_decodes, num_tokens)
        now_ns += int(took * MS)
        budget.finish_step()

    run(4, 0, 2)
    run(0, 16, 10)
    run(0, 1000, 10)
    assert budget.take(4, 1) == 0
    run(4, 0, 2)
    run(4, 16, 7)  # a short prompt, which `take` has not cut
    assert budget.take(4, 1) == 148
    run(4, 148, 2 + 2.22)
    assert budget.take(4, 1) == 100


@pytest.mark.parametrize(
    ("target_ns", "launch_ms", "room"),
    [(0, 9, 800), (0, 11, 512), (60 * MS, 50, 5800), (60 * MS, 70, 512)],
)
def test_prompts_fill_a_graph_at_most_where_the_host_launches_no_larger_step_in_time(
    target_ns, launch_ms, room
):
    now_ns = 0
    sizes = StepSizes(((0, (512,)), (8, (512,))))
    budget = PrefillBudget(lambda: now_ns, 0, target_ns, None, sizes)
    assert budget.room(4) > 1 << 32  # nothing is measured

    def launch(num_decodes, num_tokens, took, ms):
        nonlocal now_ns
        budget.start_step(num_decodes, num_tokens)
        budget.launch_took(ms * MS)
        now_ns += int(took * MS)
        budget.finish_step()

    for step in [(4, 0, 2), (4, 512, 7.12)]:
        launch(*step, 900)
    free = 800 if target_ns == 0 else 5800
    for _ in range(7):  # a few cold ones say nothing yet
        assert budget.room(4) in (free, 1 << 62)
        launch(0, 1000, 10, launch_ms)
    assert budget.room(4) == room
    launch(4, 600, 10, 1)
    assert budget.room(4) == free


def test_a_step_ends_when_the_device_says():
    now_ns = 0
    budget = PrefillBudget(lambda: now_ns)
    budget.start_step(4, 0)
    now_ns = 14 * MS  # the host launched another meanwhile
    budget.start_step(0, 1000)
    assert budget.finish_step(11 * MS).took_ns == 3 * MS
    now_ns = 20 * MS
    budget.finish_step()
    assert budget.token_ns == 6000  # 20 ms less 14, as it was launched then
