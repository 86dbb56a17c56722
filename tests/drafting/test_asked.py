"""Drafts that requests bring or ask for: tokens stay, steps are saved, nobody else is slower."""

from collections.abc import Iterator

import pytest
from fixtures.engine.checks import check, samplings
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.drafting import RandomDrafts, check_given, num_right_of, outputs_of
from fixtures.engine.hashed import VOCAB_SIZE, Words
from fixtures.guide.real import GuidedEngine
from fixtures.guide.toy import END, ToyCompiler
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import Finished, FinishReason
from slipstream_contract.beams import Beams
from slipstream_contract.drafts import Drafts
from slipstream_contract.errors import ContractError
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.limits import MAX_CLIENT_DRAFTS, MAX_DRAFT_TOKENS
from slipstream_contract.sampling import SamplingParams, check_sampling

PROMPT = [1, 2, 3]
PLAIN = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A step that the runner refuses is repeated, and no token says so."""
    yield
    assert not caplog.records


def client_of(
    speculation: RandomDrafts | None = None,
    num_blocks: int = 200,
    max_in_flight: int = 2,
    max_num_rows: int = 16,
) -> tuple[Client, CountingRunner]:
    runner = CountingRunner(num_blocks, 2, max_in_flight=max_in_flight)
    limits = Limits(8, 64, max_num_rows=max_num_rows)
    return Client(Engine(limits, runner, Words(), speculation=speculation)), runner


def asking(
    sampling: SamplingParams, token_ids: list[int], most: int | None = None
) -> SamplingParams:
    return replace(sampling, drafts=Drafts(token_ids=tuple(token_ids), most=most))


def finished(client: Client, number: int, index: int = 0) -> Finished:
    last = client.streams[number, index].last
    assert last is not None
    assert last.finished is not None
    return last.finished


def run(sampling: SamplingParams, **options: int) -> tuple[list[int], Finished]:
    """Return the rows of each step of one request, and its end."""
    client, runner = client_of(**options)
    number = client.submit(PROMPT, sampling)
    client.drain()
    check(client, number, PROMPT, sampling)
    return [len(batch.rows) for batch in runner.batches], finished(client, number)


drafts = st.tuples(st.integers(0, 24), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8))


@given(
    st.lists(st.tuples(samplings(), drafts, st.sampled_from([None, None, 0, 1, 4])), max_size=5),
    st.sampled_from([20, 200]),
    st.integers(1, 2),
    st.booleans(),
)
def test_tokens_are_those_without_drafts(asked, num_blocks, max_in_flight, has_drafter) -> None:
    own = None
    if has_drafter:
        own = RandomDrafts(AttentionWindow())
        own.most, own.right = 3, 0.5
    client, _ = client_of(own, num_blocks, max_in_flight)
    sent = []
    for sampling, (num_right, others), most in asked:
        right = outputs_of(PROMPT, sampling, 0, num_right)
        made = asking(sampling, [*right, *others], most)
        sent.append((client.submit(PROMPT, made), made))
        client.step()
    client.drain()
    for number, sampling in sent:
        check(client, number, PROMPT, sampling)
        for index in range(sampling.n):
            end = finished(client, number, index)
            if has_drafter or not sampling.drafts.most:
                check_given(PROMPT, sampling, index, end)
            assert end.perf.num_accepted <= end.perf.num_drafted


def test_right_drafts_save_steps() -> None:
    right = outputs_of(PROMPT, PLAIN, 0, 20)
    rows, end = run(asking(PLAIN, right))
    assert rows == [1, 16, 3]  # the prompt's step verifies the first
    assert (end.perf.num_drafted, end.perf.num_accepted) == (20, 20)
    assert run(asking(PLAIN, right, 4))[0] == [1, 5, 5, 5, 4]
    assert run(asking(PLAIN, right, 0))[0] == [1] * 20
    assert run(asking(PLAIN, right[:3]))[0][:4] == [1, 3, 1, 1]


def test_who_has_nothing_to_verify_runs_ahead() -> None:
    right = outputs_of(PROMPT, PLAIN, 0, 4)
    for options in ({}, {"max_num_rows": 1}):
        client, runner = client_of(**options)
        client.submit(PROMPT, asking(PLAIN, right))
        are_ahead = []
        while client.engine.has_work:
            client.step()
            are_ahead.append(len(runner.in_flight))
        # The prompt, then its drafts, are waited for, and what follows is launched at once.
        waited = [1, 1] if options else [1, 2]
        assert are_ahead == [*waited, *[1] * (len(are_ahead) - 3), 0]


def test_a_wrong_draft_ends_them() -> None:
    right = outputs_of(PROMPT, PLAIN, 0, 20)
    wrong = [*right[:2], (right[2] + 1) % VOCAB_SIZE, *right[3:]]
    rows, end = run(asking(PLAIN, wrong))
    assert rows == [1, 16] + [1] * 17
    assert (end.perf.num_drafted, end.perf.num_accepted) == (20, 2)
    rows, end = run(asking(PLAIN, [(right[0] + 1) % VOCAB_SIZE, *right[1:]]))
    assert set(rows) == {1}
    assert (end.perf.num_drafted, end.perf.num_accepted) == (20, 0)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty"])
def test_drafts_beside_penalties_are_compared_step_by_step(penalty: str) -> None:
    sampling = replace(PLAIN, **{penalty: 1.5})
    rows, end = run(asking(sampling, outputs_of(PROMPT, PLAIN, 0, 6)))
    assert set(rows) == {1}
    assert (end.perf.num_drafted, end.perf.num_accepted) == (6, 6)


def test_others_run_ahead_beside_drafts() -> None:
    """The steps of a plain request, and which of them it is in, are those without the other."""
    longest = replace(PLAIN, max_tokens=30)
    client, runner = client_of()
    plain = client.submit(PROMPT, longest)
    client.step()
    asked = asking(PLAIN, outputs_of([7, 8], PLAIN, 0, 20), 4)
    other = client.submit([7, 8], asked)
    client.drain()
    check(client, plain, PROMPT, longest)
    check(client, other, [7, 8], asked)
    slots = [[row.slot for row in batch.rows] for batch in runner.batches]
    assert sum(each.count(slots[0][0]) for each in slots[:31]) == 30
    assert max(map(len, slots)) == 6
    assert not client.engine._scheduler._verification.is_active


def test_lookup_serves_who_asks_where_the_engine_makes_no_drafts() -> None:
    runner = _Short(200, 2)
    engine = Engine(Limits(8, 64, max_num_rows=16), runner, Words())
    client = Client(engine)
    sampling = replace(PLAIN, max_tokens=36)
    plain = client.submit([9], sampling)
    number = client.submit([9], asking(sampling, [], 3))
    client.drain()
    told = [client.streams[each, 0].token_ids for each in (plain, number)]
    assert told[0] == told[1]
    perf = finished(client, number).perf
    assert perf.num_accepted > 0
    assert perf.num_drafted >= perf.num_accepted
    assert finished(client, plain).perf.num_drafted == 0
    runs = [[row.sequence_id for row in batch.rows] for batch in runner.batches]
    assert max(ids.count(1) for ids in runs) == 4
    assert max(ids.count(0) for ids in runs) == 1


class _Short(CountingRunner):
    """A model with a period."""

    def _sample(self, row, mask):  # type: ignore[no-untyped-def]
        assert super()._sample(row, mask) is not None  # it reads what was written
        return row.start % 5 + 1


def test_a_cancelled_request_with_drafts_leaves_nothing() -> None:
    client, _ = client_of()
    number = client.submit(PROMPT, asking(PLAIN, outputs_of(PROMPT, PLAIN, 0, 20), 2))
    for _ in range(3):
        client.step()
    assert client.engine.cancel(client.name, number)
    client.drain()
    assert finished(client, number).reason is FinishReason.CANCELLED
    assert not client.engine._scheduler._verification.is_active
    assert finished(client, number).perf.num_accepted > 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Drafts(token_ids=(VOCAB_SIZE,)), "draft_input_ids: token id 61 is outside"),
        (Drafts(token_ids=(-1,)), "draft_input_ids: token id -1 is outside"),
        (Drafts(token_ids=(1,) * (MAX_CLIENT_DRAFTS + 1)), "draft_input_ids has 1025 token ids"),
        (Drafts(most=-1), "most is -1"),
        (Drafts(most=MAX_DRAFT_TOKENS + 1), "most is 65"),
    ],
)
def test_what_is_out_of_bounds_is_refused(wrong: Drafts, why: str) -> None:
    client, _ = client_of()
    with pytest.raises(ContractError, match=why):
        client.submit(PROMPT, replace(PLAIN, drafts=wrong))
    assert not client.engine.has_work


def test_drafts_of_a_beam_search_are_refused() -> None:
    sampling = replace(asking(PLAIN, [1]), beams=Beams(width=2))
    with pytest.raises(ContractError, match=r"draft_input_ids.*beam_width"):
        check_sampling(sampling)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}])
def test_drafts_go_with_guides(filters: dict[str, int]) -> None:
    """Right ones and illegal ones, with samples that are validated and with masks."""
    wanted = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "end_ids": (END,), **filters}

    def run(drafts: Drafts | None) -> tuple[list[int], Finished, int]:
        runner = CountingRunner(64, 4)
        engine = GuidedEngine(runner, lambda: ToyCompiler({}, {}), Limits(8, 64))
        number = engine.submit([1, 2], Guide(GuideKind.REGEX, "y"), **wanted, drafts=drafts)
        engine.drain()
        end = engine.ends[number, 0].finished
        assert end is not None
        return engine.outputs[number, 0], end, max(len(batch.rows) for batch in runner.batches)

    plain, _, _ = run(None)
    for drafts in (plain, [*plain, 1, 2], [*plain[:2], 0, *plain[3:]], [60] * 9):
        told, end, most = run(Drafts(token_ids=tuple(drafts)))
        assert told == plain
        num_right = num_right_of(drafts, plain)
        assert (end.perf.num_drafted, end.perf.num_accepted) == (len(drafts), num_right)
        assert (most > 1) == (num_right > 0 and not filters)
