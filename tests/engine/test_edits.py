"""Edits in the engine: tokens are those by definition, with drafts, preemption and siblings."""

import json

import pytest
from fixtures.engine.checks import check, greedy
from fixtures.engine.client import Client
from fixtures.engine.counting import CountingRunner
from fixtures.engine.drafting import RandomDrafts
from fixtures.engine.hashed import MARKER, VOCAB_SIZE, Words
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.edits import EditContext
from slipstream.core.processors import load_processors
from slipstream.core.thinking import Thinking
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.wire import FinishReason
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams

PLACES = "fixtures.engine.processors:ByLast, fixtures.engine.processors:Odd"
CONTEXT = EditContext(VOCAB_SIZE, Words(), Thinking("m", MARKER), load_processors(PLACES))
ids = st.integers(0, VOCAB_SIZE - 1)


def client_of(num_blocks: int = 60, most: int = 0, right: float = 1.0, **options: int) -> Client:
    drafts = RandomDrafts(AttentionWindow())
    drafts.most, drafts.right = most, right
    limits = Limits(8, 64, max_num_rows=32)
    runner = CountingRunner(num_blocks, 2, **options)
    return Client(Engine(limits, runner, Words(), speculation=drafts, edit_context=CONTEXT))


def asked_for(name: str, **arguments: object) -> tuple[tuple[str, str], ...]:
    return ((name, json.dumps(arguments)),)


@st.composite
def edited(draw: st.DrawFn) -> SamplingParams:
    remainder = draw(st.sampled_from([None, None, 0, 3]))
    return SamplingParams(
        max_tokens=draw(st.integers(1, 24)),
        min_tokens=draw(st.sampled_from([0, 3])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 99)),
        n=draw(st.sampled_from([1, 1, 3])),
        end_ids=(7,),
        bad_words=draw(st.sampled_from([(), ((1, 2), (3,))])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 2, 3])),
        allowed_token_ids=draw(st.sampled_from([(), tuple(range(30))])),
        thinking_token_budget=draw(st.sampled_from([None, None, 0, 2, 9])),
        logits_processors=() if remainder is None else asked_for("by_last", remainder=remainder),
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.lists(ids, min_size=1, max_size=12), edited()), min_size=1, max_size=6),
    st.sampled_from([20, 60]),
    st.integers(0, 5),
    st.sampled_from([0.7, 1.0]),
    st.integers(1, 2),
)
def test_tokens_are_those_by_definition(
    asked: list[tuple[list[int], SamplingParams]],
    num_blocks: int,
    most: int,
    right: float,
    max_in_flight: int,
) -> None:
    client = client_of(num_blocks, most, right, max_in_flight=max_in_flight)
    numbers = [client.submit(prompt, sampling) for prompt, sampling in asked]
    client.drain()
    for number, (prompt, sampling) in zip(numbers, asked, strict=True):
        check(client, number, prompt, sampling)


@pytest.mark.parametrize("most", [0, 4])
def test_thinking_ends_after_its_budget(most: int) -> None:
    client = client_of(most=most)
    client.submit([1], greedy(12, thinking_token_budget=4, bad_words=((MARKER[0],), (9,))))
    client.drain()
    assert tuple(client.streams[0, 0].token_ids[4:7]) == MARKER
    assert not {5, 9} & {*client.streams[0, 0].token_ids[7:]}  # other bans hold again


def test_a_model_that_marks_no_end_of_thinking_refuses_a_budget() -> None:
    client = Client(Engine(Limits(8, 64), CountingRunner(60, 2), Words()))
    with pytest.raises(ContractError, match=r"thinking_token_budget is 3.*thinking_end"):
        client.submit([1], greedy(9, thinking_token_budget=3))


def test_breakers_need_a_tokenizer() -> None:
    client = Client(Engine(Limits(8, 64), CountingRunner(60, 2), None))
    with pytest.raises(ContractError, match="dry_sequence_breakers need a tokenizer"):
        client.submit([1], greedy(9, dry_multiplier=1.0))
    client.submit([1], greedy(9, dry_multiplier=1.0, dry_sequence_breakers=()))
    client.drain()


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "logits_processors.odd failed: IndexError: 'list index out of range'"),
        ("nan", "logits_processors.odd adds nan to token 1"),
        ("id", "logits_processors.odd edits token 1000000, which is no token"),
        ("many", "logits_processors.odd edits 5000 tokens, at most 4096 are served"),
        ("bans", "no token is left: logits_processors.odd bans all 61 of them"),
    ],
)
def test_a_processor_that_fails_ends_its_request_alone(kind: str, said: str, most: int) -> None:
    client = client_of(most=most)
    plain = greedy(9)
    client.submit([1, 2], plain)
    client.submit([1, 2], greedy(9, logits_processors=asked_for("odd", kind=kind, after=2)))
    client.drain()
    check(client, 0, [1, 2], plain)
    stream = client.streams[1, 0]
    assert stream.token_ids == client.streams[0, 0].token_ids[:2]
    assert (stream.reason, stream.last.finished.error) == (FinishReason.ERROR, said)  # type: ignore[union-attr]


@pytest.mark.parametrize("most", [0, 3])
def test_a_processor_that_changes_what_it_is_given_changes_no_sequence(most: int) -> None:
    client, plain = client_of(most=most), greedy(9)
    for processors in (asked_for("odd", kind="changes"), ()):  # the second finds the first's prefix
        number = client.submit([4, 2, 3, 1, 5], greedy(9, logits_processors=processors))
        client.drain()
        check(client, number, [4, 2, 3, 1, 5], plain)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (asked_for("none"), "logits_processors has 'none', not one of by_last, odd"),
        (asked_for("by_last"), "logits_processors.by_last: remainder is missing"),
        (asked_for("odd", kind="validate"), "odd refuses its arguments: ZeroDivisionError"),
    ],
)
def test_a_processor_is_refused_by_its_name(asked: object, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        client_of().submit([1], greedy(9, logits_processors=asked))


def test_without_processors_none_can_be_named() -> None:
    client = Client(Engine(Limits(8, 64), CountingRunner(60, 2), Words()))
    with pytest.raises(ContractError, match="has 'by_last', not as none is loaded"):
        client.submit([1], greedy(9, logits_processors=asked_for("by_last", remainder=1)))


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (
            greedy(9, allowed_token_ids=(4,), bad_words=((4,),)),
            "bad_words and allowed_token_ids together ban",
        ),
        (greedy(9, allowed_token_ids=(7,), min_tokens=2, end_ids=(7,)), "min_tokens and allowed_"),
        (greedy(9, allowed_token_ids=(4,), no_repeat_ngram_size=2), "_ids and no_repeat_ngram_"),
        (greedy(9, allowed_token_ids=(4,), bad_words=((4, 4),)), "allowed_token_ids and bad_words"),
    ],
)
@pytest.mark.parametrize("most", [0, 3])
def test_an_error_names_what_left_no_token(sampling: SamplingParams, said: str, most: int) -> None:
    client = client_of(most=most)
    client.submit([1, 4], sampling)
    client.drain()
    stream = client.streams[0, 0]
    assert stream.reason is FinishReason.ERROR
    finished = stream.last.finished
    assert finished is not None
    assert finished.is_refusal, "the request's fault, not the engine's"
    error = finished.error
    assert error.startswith("no token is left: ")
    assert said in error
