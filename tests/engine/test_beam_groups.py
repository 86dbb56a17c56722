"""Beams in the engine: the same as by definition, whatever runs beside them."""

import re

import pytest
from fixtures.engine.beams import expected_beams, searches, text_of
from fixtures.engine.checks import check, greedy, samplings
from fixtures.engine.client import Client, Stream
from fixtures.engine.counting import CountingRunner
from fixtures.engine.hashed import MAX_LEN, VOCAB_SIZE, Words
from fixtures.engine.machine import MAX_MODEL_LEN, Machine
from fixtures.engine.machine import prompts as machine_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason
from slipstream_contract.beams import Beams
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams


def make(
    num_blocks: int = 60, size: int = 4, num_seqs: int = 8, num_tokens: int = 64, **options: object
) -> tuple[Client, CountingRunner]:
    runner = CountingRunner(num_blocks, size, **options)
    return Client(Engine(Limits(num_seqs, num_tokens), runner, Words())), runner


def of_width(width: int, max_tokens: int = 8, **options: object) -> SamplingParams:
    n = options.pop("n", width)
    return greedy(max_tokens, n=n, beams=Beams(width=width), **options)


def check_beams(client: Client, number: int, prompt: list[int], sampling: SamplingParams) -> None:
    found = expected_beams(prompt, sampling, MAX_LEN, client.engine._runner.window)
    answers = client.streams[number, 0].beams
    assert [(text_of(a.token_ids, a.drop_bytes), a.reason) for a in answers] == [
        (each.text, each.reason) for each in found
    ]
    assert [a.cum_log_prob for a in answers] == pytest.approx([f.cum_log_prob for f in found])
    for answer in answers:
        assert len(answer.log_probs) == (len(answer.token_ids) if sampling.log_probs else 0)


class Searches(Machine):
    """Beam searches under all that `Machine` does to an engine, beside its other requests."""

    @rule(
        prompt=machine_prompts,
        sampling=searches(),
        priority=st.integers(0, 9),
        timeout_ms=st.sampled_from([0, 0, 0, 2, 8]),
        is_streaming=st.booleans(),
    )
    def search(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int,
        timeout_ms: int,
        is_streaming: bool,
    ) -> None:
        deadline_ns = self.now_ns + timeout_ms * 1_000_000 if timeout_ms else 0
        ask = (prompt, sampling, priority, deadline_ns)
        try:
            number = self.client.submit(*ask, is_streaming=is_streaming)
        except ContractError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            is_too_wide = re.search("beam_width is [0-9]+(, above|: so many beams)", refusal)
            assert is_too_wide or "UNAVAILABLE" in refusal
            return
        self.asked[number] = (prompt, sampling)
        if deadline_ns:
            self.deadlines[number] = deadline_ns

    def check_search(self, number: int, stream: Stream) -> None:
        if stream.reason is FinishReason.CANCELLED:
            assert number in self.cancelled
        elif stream.reason is FinishReason.DEADLINE:
            assert self.deadlines[number] <= self.now_ns
        elif stream.reason is FinishReason.ERROR:
            assert number in self.may_fail
        else:
            prompt, sampling = self.asked[number]
            found = expected_beams(prompt, sampling, MAX_MODEL_LEN, self.runner.window)
            answers = [(text_of(a.token_ids, a.drop_bytes), a.reason) for a in stream.beams]
            assert answers == [(each.text, each.reason) for each in found]


TestSearches = Searches.TestCase
TestSearches.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)


@settings(max_examples=300)
@given(
    asked=st.lists(st.tuples(prompts, st.one_of(searches(), samplings())), min_size=1, max_size=5),
    num_blocks=st.integers(44, 70),
    size=st.integers(1, 5),
    num_tokens=st.integers(5, 40),
    max_in_flight=st.integers(1, 2),
)
def test_beams_beside_others_are_those_by_definition(
    asked: list[tuple[list[int], SamplingParams]],
    num_blocks: int,
    size: int,
    num_tokens: int,
    max_in_flight: int,
) -> None:
    client, _ = make(num_blocks * 4 // size + 40, size, 5, num_tokens, max_in_flight=max_in_flight)
    numbers = [client.submit(prompt, sampling) for prompt, sampling in asked]
    client.drain()
    for number, (prompt, sampling) in zip(numbers, asked, strict=True):
        (check_beams if sampling.beams else check)(client, number, prompt, sampling)


def test_one_beam_search() -> None:
    client, _ = make()
    sampling = of_width(4, log_probs=True)
    number = client.submit([1, 2, 3], sampling)
    client.drain()
    check_beams(client, number, [1, 2, 3], sampling)


@pytest.mark.parametrize("width", [2, 5])
def test_a_stream_has_whole_beams_after_every_step(width: int) -> None:
    client, _ = make()
    sampling = of_width(width, max_tokens=6)
    number = client.submit([1, 2, 3], sampling, is_streaming=True)
    lengths = []
    while client.engine.has_work:
        client.step()
        if beams := client.streams[number, 0].beams:
            lengths.append({len(each.token_ids) for each in beams})
    assert lengths[:4] == [{1}, {2}, {3}, {4}][: len(lengths)]
    check_beams(client, number, [1, 2, 3], sampling)


def test_a_cancelled_search_returns_its_beams_as_they_stand() -> None:
    client, _ = make()
    number = client.submit([1, 2, 3], of_width(3, max_tokens=20))
    for _ in range(6):
        client.step()
    assert client.engine.cancel(client.name, number)
    client.drain()
    beams = client.streams[number, 0].beams
    assert len(beams) == 3
    assert {each.reason for each in beams} == {FinishReason.CANCELLED}
    assert client.streams[number, 0].reason is FinishReason.CANCELLED


@pytest.mark.parametrize("is_late", [False, True])
def test_a_beam_that_fails_ends_its_group_alone(is_late: bool) -> None:
    client, runner = make()
    bad = client.submit([1, 2, 3], of_width(3))
    good = client.submit([1, 2, 4], sampling := of_width(3))
    for _ in range(5):
        client.step()
    runner.breaks_late = is_late
    runner.broken.add(client.engine._requests[client.name, bad].sequences[0].group.live[-1].id)
    client.drain()
    assert client.streams[bad, 0].reason is FinishReason.ERROR
    check_beams(client, good, [1, 2, 4], sampling)


def test_a_step_that_fails_once_changes_nothing() -> None:
    client, runner = make()
    number = client.submit([1, 2, 3], sampling := of_width(4))
    for at in range(30):
        if at in (3, 7, 8):
            runner.error = ValueError("planted")
        client.step()
    client.drain()
    check_beams(client, number, [1, 2, 3], sampling)


CHUNKS = AttentionWindow(6, is_chunked=True)


@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow(6), CHUNKS])
def test_preempted_groups_go_on_with_the_same_beams(window: AttentionWindow) -> None:
    client, _ = make(window=window, num_blocks=100)
    asked = {client.submit([i, 2, 3], s): ([i, 2, 3], s) for i, s in enumerate([of_width(3)] * 2)}
    for at in range(200):
        running = list(client.engine._scheduler.running.values())
        if at % 5 == 4 and running and running[at % len(running)].num_preemptions < 3:
            client.engine._scheduler._running.preempt(running[at % len(running)])
        client.step()
    client.drain()
    for number, (prompt, sampling) in asked.items():
        check_beams(client, number, prompt, sampling)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_group_preempted_before_its_forks_knows_its_own_prefixes(at: int) -> None:
    """Its beams have other tokens than those that their blocks were computed from."""
    client, _ = make(num_blocks=200, size=1)
    number = client.submit([1, 2, 3], sampling := of_width(4))
    lead = client.engine._requests[client.name, number].sequences[0]
    scheduler, num_choices = client.engine._scheduler, 0
    fork_all = scheduler._groups.fork_all

    def preempt_and_fork() -> None:
        nonlocal num_choices
        num_choices += bool(lead.group.moves)
        if lead.group.moves and num_choices == at:
            scheduler._running.preempt(lead)
            for beam in lead.group.live:
                scheduler.cache.match(beam)
                chain = scheduler.cache.index.chain("")
                chain.extend(beam.ids(0, beam.num_known).tobytes())
                assert beam.cache.chain.digests == chain.digests
        fork_all()

    scheduler._groups.fork_all = preempt_and_fork
    client.drain()
    assert num_choices > at
    check_beams(client, number, [1, 2, 3], sampling)


def test_too_many_beams_are_refused_by_name() -> None:
    client, _ = make(num_seqs=3)
    with pytest.raises(ContractError, match="beam_width is 4, above 3, the most"):
        client.submit([1], of_width(4))
    client, _ = make(num_blocks=9)
    with pytest.raises(ContractError, match=r"beams of up to 13 tokens need 12 blocks.* has 9;"):
        client.submit([1], of_width(3, max_tokens=12))


def test_a_search_that_just_fits_is_admitted_again() -> None:
    """Each beam needs blocks of its own then, and none is left for what does not run."""
    runner = CountingRunner(9, 4)
    client = Client(Engine(Limits(4, 64, kv_cache_reuse=False), runner, Words()))
    asked = SamplingParams(max_tokens=6, temperature=1.0, seed=3, beams=Beams(width=3), n=3)
    client.submit([1, 2, 3, 4, 5, 6], asked)
    for _ in range(4):
        client.step()
    running = client.engine._scheduler._running
    assert len(running.sequences) == 3
    running.preempt(next(iter(running.sequences.values())))
    client.drain()
