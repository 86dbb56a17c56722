"""The real engine, and a stand-in for another's scheduler, over simulated steps.

Time is a number. `slipstream` drives `Engine` itself, with its scheduler and all its queues; only
the runner is simulated: a step takes what `StepTimes` says, padded to the shape of its graph where
it has one, and gives every row a token.
`first_come` is a stand-in for vLLM: chunks in order of arrival within the tokens of a step, decodes
first, a step scheduled while the one before it runs. It is written from what vLLM documents of its
scheduler; nothing of vLLM runs.
"""

from collections import deque
from dataclasses import dataclass, replace

from slipstream.core.batch import Batch, Outcome, Sampled
from slipstream.core.step_sizes import StepSizes
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.graphs import Buckets
from slipstream.runner.step_shape import Layout
from slipstream.wire import Submit
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams
from step_times import StepTimes
from traces import Answers, Trace

NS = 1_000_000_000
HOST_S = 0.0003  # of the host, between two launches
MAX_ROWS = 256
NUM_BLOCKS = 13_000  # of 32 tokens: what an H100 has beside 16 GB of weights
_TOKEN = 7
_LAYOUT = Layout()


class _Step:
    """A launched step of the simulated runner."""

    def __init__(self, runner: "SimulatedRunner", num_samples: int, end_s: float) -> None:
        self._runner = runner
        self._num_samples = num_samples
        self._end_s = end_s

    def wait(self) -> Sampled:
        """Advance the clock to the end of the step."""
        runner, count = self._runner, self._num_samples
        ago_ns = int(max(0.0, runner.now_s - self._end_s) * NS)
        runner.now_s = max(runner.now_s, self._end_s)
        outcomes = [int(Outcome.SAMPLED)] * count
        return Sampled([_TOKEN] * count, [0.0] * count, outcomes, ended_ago_ns=ago_ns)

    def give_mask(self, sample: int, mask: bytes) -> None:
        """Refuse: nothing is guided here."""
        raise AssertionError("no row has a mask")


class SimulatedRunner:
    """A runner that computes nothing and takes the time of it."""

    block_size = 32
    vocab_size = 1024
    transfers = None
    max_in_flight = 2
    attention_doubles_at = 0
    buckets: Buckets | None = Buckets(MAX_ROWS, 2048)  # of graphs; None: there are none

    def __init__(self, times: StepTimes, num_blocks: int = NUM_BLOCKS) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = num_blocks * self.block_size
        self.window = AttentionWindow()
        self.now_s = 0.0
        self.free_s = 0.0
        self.steps: list[tuple[float, float, int, int]] = []
        self._times = times

    @property
    def step_sizes(self) -> StepSizes:
        """Sizes of steps that leave no rows idle."""
        return self.buckets.sizes if self.buckets else StepSizes()

    def clock(self) -> int:
        """Return the simulated time in ns."""
        return int(self.now_s * NS)

    def launch(self, batch: Batch) -> _Step:
        """Put a step behind those that run."""
        rows, num_decodes = batch.rows, batch.num_decodes
        context = sum([row.start for row in rows[:num_decodes]])
        chunks = [(row.start, len(row.token_ids)) for row in rows[num_decodes:]]
        shape = _LAYOUT.shape_of(batch)
        graph = self.buckets.find(shape) if self.buckets else None
        padding = graph.num_tokens - shape.num_tokens if graph else 0
        took = self._times.step_ms(num_decodes, context, chunks, padding) / 1e3
        self.now_s += HOST_S
        begin = max(self.now_s, self.free_s)
        if chunks and graph is None:
            self.now_s += self._times.eager_ms / 1e3  # while the device runs
        self.free_s = max(begin + took, self.now_s)
        self.steps.append((begin, took, num_decodes, sum(size for _, size in chunks)))
        return _Step(self, sum([row.samples for row in rows]), self.free_s)


def slipstream(trace: Trace, times: StepTimes, limits: Limits) -> Answers:
    """Run a trace through the engine, to its end."""
    runner = SimulatedRunner(times)
    limits = replace(limits, kv_cache_reuse=False)  # all prompts begin alike
    engine = Engine(limits, runner, None, clock=runner.clock)
    answers, sent, arrivals = Answers(trace), 0, trace.arrivals
    prompt = TokenIds("i", [_TOKEN]) * max(each.num_input for each in arrivals)
    while sent < len(arrivals) or engine.has_work:
        if not engine.has_work:
            runner.now_s = max(runner.now_s, arrivals[sent].due_s)
        due_s = runner.now_s + engine.slack_ns() / NS
        while sent < len(arrivals) and arrivals[sent].due_s <= due_s:
            each = arrivals[sent]
            runner.now_s = max(runner.now_s, each.due_s)
            sampling = SamplingParams(max_tokens=each.num_output, temperature=0.0)
            message = Submit(sent, prompt[: each.num_input], sampling, runner.clock() or 1)
            engine.submit(b"simulated", message)
            sent += 1
        runner.now_s = max(runner.now_s, due_s)
        for tokens in engine.step().get(b"simulated", ()):
            times_of = answers.times[tokens.request]
            first_s = times.first_ms / 1e3 if not times_of else 0.0
            times_of += [runner.now_s + first_s] * len(tokens.token_ids)
    answers.steps = runner.steps
    return answers


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request of the stand-in: what is scheduled of it, and how many tokens it then has."""

    number: int
    num_input: int
    num_output: int
    num_scheduled: int = 0
    num_made: int = 0  # scheduled

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that no step has taken."""
        return self.num_input - self.num_scheduled


def first_come(trace: Trace, times: StepTimes, budget: int) -> Answers:
    """Run a trace through the stand-in for vLLM, with so many tokens a step."""
    answers, sent, arrivals = Answers(trace), 0, trace.arrivals
    waiting: deque[_Waiting] = deque()
    running: list[_Waiting] = []
    flights: deque[tuple[float, list[_Waiting]]] = deque()
    now = free = 0.0
    while sent < len(arrivals) or waiting or running or flights:
        if not (waiting or running or flights):
            now = max(now, arrivals[sent].due_s)
        while sent < len(arrivals) and arrivals[sent].due_s <= now:
            each = arrivals[sent]
            waiting.append(_Waiting(sent, each.num_input, each.num_output))
            sent += 1
        while len(flights) < 2:
            decodes, chunks = _take(waiting, running, budget)
            if not (decodes or chunks):
                break
            context = sum([r.num_input + r.num_made for r in decodes])
            sizes = [(request.num_scheduled, size) for request, size in chunks]
            took = times.step_ms(len(decodes), context, sizes) / 1e3
            now += HOST_S
            begin, total = max(now, free), sum(size for _, size in sizes)
            free = begin + took
            answers.steps.append((begin, took, len(decodes), total))
            flights.append((free, _schedule(decodes, chunks)))
            running = [r for r in running if r.num_left or r.num_made < r.num_output]
        if flights:
            end, samplers = flights.popleft()
            now = max(now, end)
            for request in samplers:
                got = answers.times[request.number]
                got.append(now if got else now + times.first_ms / 1e3)
    return answers


def _take(
    waiting: deque[_Waiting], running: list[_Waiting], budget: int
) -> tuple[list[_Waiting], list[tuple[_Waiting, int]]]:
    """Choose a step: running requests in their order, then those that wait in theirs."""
    decodes, chunks = [], []
    for request in running:
        if not budget:
            break
        if request.num_left:
            chunks.append((request, min(budget, request.num_left)))
            budget -= chunks[-1][1]
        else:
            decodes.append(request)
            budget -= 1
    while budget and waiting and len(running) < MAX_ROWS:
        request = waiting.popleft()
        running.append(request)
        chunks.append((request, min(budget, request.num_left)))
        budget -= chunks[-1][1]
    return decodes, chunks


def _schedule(decodes: list[_Waiting], chunks: list[tuple[_Waiting, int]]) -> list[_Waiting]:
    """Count a step as scheduled; return the requests that get a token by it."""
    for request, size in chunks:
        request.num_scheduled += size
    samplers = decodes + [request for request, _ in chunks if not request.num_left]
    for request in samplers:
        request.num_made += 1
    return samplers
