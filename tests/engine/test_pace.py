"""Isolation: what a long prompt does to the streams beside it, in the measured times of a GPU."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from engine.counting import Client, Counted, CountingRunner, Words
from slipstream.engine.batch import Batch, Sampled
from slipstream.engine.engine import Engine
from slipstream.engine.pace import Pace
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams

MS = 1_000_000


@dataclass(frozen=True)
class Costs:
    """Of a step, in ms: a part that is always there, and more for each decode and chunk token."""

    step: float
    decode: float
    token: float
    max_in_flight: int
    budget: int
    length: int  # of the long prompt


# An 8B model in bf16 on an H200 (benchmarks/results/step-h200.json), and a small one on a CPU.
H200 = Costs(3.7, 0.021, 1000 / 42_000, 2, 4096, 32_768)
CPU = Costs(2.0, 0.2, 0.25, 1, 2048, 2_047)


class TimedStep(Counted):
    """It runs when those before it have ended, and ends when its time is over."""

    end_ns = 0

    def wait(self) -> Sampled:
        runner = self._runner
        assert isinstance(runner, TimedRunner)
        runner.now_ns = max(runner.now_ns, self.end_ns)
        return super().wait()


class TimedRunner(CountingRunner):
    """Its steps take the time that they cost, on a clock of its own."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(4096, 32, 80_000, costs.max_in_flight)
        self.now_ns = 1_000 * MS
        self.free_ns = 0
        self.costs = costs

    def clock(self) -> int:
        return self.now_ns

    def launch(self, batch: Batch) -> Counted:
        super().launch(batch)
        step = TimedStep(self, self.in_flight.pop().batch, None)
        self.in_flight.append(step)
        num_tokens = batch.num_tokens - batch.num_decodes
        costs = self.costs
        took = costs.step + costs.decode * batch.num_decodes + costs.token * num_tokens
        step.end_ns = self.free_ns = max(self.now_ns, self.free_ns) + int(took * MS)
        return step


class Streams:
    """Requests that decode, and when each step told their tokens."""

    def __init__(self, costs: Costs, long_prompt_tokens: int = 1024) -> None:
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
        """p99 between two tokens of the watched stream since the last time."""
        times, self.times_ns = self.times_ns, self.times_ns[-1:]
        gaps = sorted(b - a for a, b in pairwise(times))
        return gaps[len(gaps) * 99 // 100] / MS


def beside(costs: Costs, num_streams: int, long_prompt_tokens: int = 1024) -> tuple[float, float]:
    """How much longer a stream waits for a token while a long prompt is computed, and it for its
    first than the device alone would take."""
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
    return streams.gap_ms() / usual_ms, took_ms / (costs.token * costs.length)


@pytest.mark.parametrize("costs", [H200, CPU], ids=["H200", "CPU"])
@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_a_long_prompt_at_most_doubles_the_time_to_the_next_token(costs, num_streams):
    stretch, delay = beside(costs, num_streams)
    assert 1.4 < stretch <= 2.0
    assert delay < 3.5  # three sevenths of every step are the prompt's


def test_many_long_prompts_are_computed_nearly_as_fast_as_without_the_rule():
    def took_ms(long_prompt_tokens: int) -> float:
        streams = Streams(H200, long_prompt_tokens)
        begun_ns = streams.runner.now_ns
        numbers = [streams.ask(6_000, 100) for _ in range(16)]
        while not all(map(streams.has_begun, numbers)):
            streams.step()
        return (streams.runner.now_ns - begun_ns) / MS

    assert took_ms(1024) < 1.25 * took_ms(10**6)


def test_without_the_rule_it_would_stand_still():
    stretch, _ = beside(H200, 64, long_prompt_tokens=10**6)
    assert stretch > 10


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


def test_a_void_step_is_not_measured():
    now_ns = 0
    pace = Pace(lambda: now_ns)
    for took in [2] * 7:
        pace.begin(4, 0)
        now_ns += took * MS
        pace.end()
    pace.begin(0, 1000)
    now_ns += 10 * MS
    pace.end()
    assert pace.take(1) == 144  # that many take 2 ms
    pace.begin(4, 0)
    pace.begin(4, 0)
    now_ns += 1000 * MS
    pace.forget()
    for _ in range(3):
        pace.begin(4, 0)
        now_ns += 2 * MS
        pace.end()
    assert pace.take(1) == 144
