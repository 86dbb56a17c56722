"""The decision how many drafts are verified, and real drafts in the engine."""

from collections.abc import Callable

import pytest
from fixtures.engine.checks import check
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.drafting import continuation
from fixtures.engine.hashed import Words
from msgspec.structs import replace
from slipstream.core.drafts import Drafter, Proposal
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.drafting.costs import StepTimes
from slipstream.drafting.counts import DraftCounts
from slipstream.drafting.longest import LongestMatch
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.drafting.suffix import SuffixDrafts
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.figures import DRAFT_POSITIONS
from slipstream_contract.drafts import Drafts
from slipstream_contract.sampling import SamplingParams


class Knowing:
    """Drafts that are always right, or always wrong."""

    def __init__(self, is_right: bool) -> None:
        self._is_right = is_right

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        drafts = continuation(sequence, k, AttentionWindow())
        if not self._is_right:
            drafts = [(token_id + 1) % 61 for token_id in drafts]
        return Proposal(drafts, "lookup")

    def release(self, sequence: Sequence) -> None:
        pass


class _Fixed(StepTimes):
    """Times that are not measured anew."""

    def __init__(self, plain_ns: float, row_ns: float) -> None:
        super().__init__()
        self._plain_ns, self._row_ns = plain_ns, row_ns

    def of(self, num_rows: int, has_drafts: bool) -> float:
        return self._plain_ns + self._row_ns * num_rows


def engine_of(speculator: Speculator) -> tuple[Client, CountingRunner]:
    runner = CountingRunner(200, 4)
    return Client(
        Engine(Limits(8, 64, max_num_rows=64), runner, Words(), speculation=speculator)
    ), runner


def run(speculator: Speculator, num_requests: int = 3) -> tuple[list[int], DraftCounts]:
    """Return the rows of all steps, and what became of drafts."""
    client, runner = engine_of(speculator)
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=3, log_probs=True)
    asked = [(client.submit([i, 1, 2], sampling), [i, 1, 2]) for i in range(num_requests)]
    client.drain()
    for number, prompt in asked:
        check(client, number, prompt, sampling)
        last = client.streams[number, 0].last
        assert last is not None
        assert last.finished is not None
        perf = last.finished.perf
        assert perf.num_accepted <= perf.num_drafted
    counts = client.engine._scheduler.draft_counts
    return [len(batch.rows) for batch in runner.batches], counts


@pytest.mark.parametrize("most", [0, 2, 9])
def test_a_step_has_no_more_drafts_than_a_request_asks_for(most: int) -> None:
    client, runner = engine_of(Speculator(Knowing(True), 4, _Fixed(1000.0, 1.0)))
    plain = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    asked = {client.submit([1, 2], replace(plain, drafts=Drafts(most=most))): most}
    asked[client.submit([3, 2], plain)] = 4
    client.drain()
    for number, limit in asked.items():
        ids = [[row.sequence_id for row in batch.rows] for batch in runner.batches]
        assert max(each.count(number) for each in ids) == 1 + min(4, limit)
        check(client, number, [1, 2] if number == 0 else [3, 2], plain)


def test_right_drafts_are_verified_where_rows_cost_nothing() -> None:
    speculator = Speculator(Knowing(True), 4, _Fixed(1000.0, 1.0))
    rows, counts = run(speculator)
    assert max(rows) == 15
    assert len(rows) < 20
    assert counts.total("accepted_tokens") == counts.total("drafted_tokens") > 50
    counters = counts.counters
    assert counters["accepted_tokens:lookup"] == counts.total("accepted_tokens")
    at = [counters[f"accepted_at:{position}"] for position in DRAFT_POSITIONS]
    assert at == sorted(at, reverse=True)
    assert sum(at) == counts.total("accepted_tokens")
    assert at[4] == 0 < at[3] <= at[0] == counters["drafts:lookup"]


def test_nothing_is_verified_where_rows_cost_as_much_as_they_bring() -> None:
    speculator = Speculator(Knowing(True), 4, _Fixed(0.0, 1.0))
    rows, counts = run(speculator)
    assert max(rows) <= 3
    assert counts.total("drafts") == 0


def test_wrong_drafts_leave_the_steps_as_they_were() -> None:
    speculator = Speculator(Knowing(False), 4, _Fixed(1000.0, 1.0))
    rows, counts = run(speculator)
    assert max(rows) <= 3
    assert counts.total("drafts") == 0


@pytest.mark.parametrize(
    "make", [PromptLookup, SuffixDrafts, lambda: LongestMatch(PromptLookup(), SuffixDrafts())]
)
def test_drafters_in_the_engine_change_no_token(make: Callable[[], Drafter]) -> None:
    speculator = Speculator(make(), 8, _Fixed(1000.0, 1.0))
    for _ in range(2):  # the second time, suffix drafts know the answers
        run(speculator, 6)


def test_suffix_drafts_say_again_what_was_said() -> None:
    speculator = Speculator(SuffixDrafts(), 8, _Fixed(1000.0, 1.0))
    (first, _), (again, counts) = run(speculator, 6), run(speculator, 6)
    assert len(again) < 0.7 * len(first)
    assert counts.counters["accepted_tokens:suffix"] > 50


def test_times_of_steps_that_were_never_measured_are_those_of_fewer_rows() -> None:
    times = StepTimes()
    assert times.of(4, True) is None
    times.add(4, False, 100.0)
    assert times.of(4, False) == 100.0
    assert times.of(9, False) is None
    assert times.of(9, True) == 100.0
    times.add(9, True, 1000.0)  # the first time may be a pause of the host, too
    assert times.of(9, True) == times.of(12, True) == 200.0
    assert times.of(16, True) == 200.0 + (16 - 12) * (200.0 - 100.0) / (12 - 4)
    times.release_drafts()
    assert times.of(9, True) == times.of(4, False) == 100.0
