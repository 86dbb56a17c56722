"""Every two features in one request, at every model name: served as by themselves, or refused.

A request has several features, so that few requests have all pairs (fixtures/features/covering.py).
"""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from fixtures.bridge.texts import TEXT
from fixtures.features import answers, plain
from fixtures.features.covering import cover
from fixtures.features.house import House, tensors_of
from fixtures.features.pairing import cases, may_meet, refused
from fixtures.features.table import FEATURES, MODELS, SAMPLED, body_of, has
from fixtures.tiers import quick_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream_contract import pairs
from slipstream_contract.errors import ContractError
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import LLMAPI

ROOT = Path(__file__).resolve().parents[2]
IN_PROCESS = MODELS[1:]  # the ensemble's steps are one wiring's here; a real server has them


@pytest.mark.parametrize("model", MODELS)
def test_every_pair_that_may_meet_does(model: str) -> None:
    names = [feature.name for feature in FEATURES if has(model, feature.name)]
    met = {frozenset(pair) for case in cases(model) for pair in combinations(case, 2)}
    wanted = {frozenset(p) for p in combinations(names, 2) if may_meet(model, *p)}
    assert wanted <= met
    assert all(may_meet(model, *tuple(pair)) for pair in met)
    assert {name for case in cases(model) for name in case} == set(names)
    assert len(cases(model)) < len(wanted) / 4


@given(st.sets(st.sampled_from("abcdefghij"), min_size=2), st.randoms(use_true_random=False))
def test_the_design_covers_whatever_may_meet(letters, random) -> None:
    names = sorted(letters)
    forbidden = {p for p in combinations(names, 2) if random.random() < 0.3}
    made = list(cover(names, lambda a, b: (a, b) not in forbidden, 4))
    met = {pair for each in made for pair in combinations(each, 2)}
    assert met == set(combinations(names, 2)) - forbidden
    assert {name for each in made for name in each} == set(names)
    assert made == list(cover(names, lambda a, b: (a, b) not in forbidden, 4))


CASES = [(model, case) for model in IN_PROCESS for case in cases(model)]


@pytest.mark.parametrize(
    "case", quick_of(CASES, CASES[::18]), ids=["-".join((model, *names)) for model, names in CASES]
)
def test_the_answer_is_that_of_the_features(house: House, case) -> None:
    model, names = case
    responses = house.ask(model, body_of(model, names))
    answer = answers.read(model, names, responses)
    answers.check(model, names, answer, responses)
    plain = answers.plain_names(names)
    if plain != names:
        own = answers.read(model, plain, house.ask(model, body_of(model, plain)))
        assert (answer.texts, answer.num_tokens) == (own.texts, own.num_tokens)
    if model == LLMAPI.name:  # the same engine, asked in vLLM's words
        others = [name for name in plain if has("vllm_model", name)]
        given = others if "greedy" in others or _samples(others) else ["greedy", *others]
        theirs = house.ask("vllm_model", body_of("vllm_model", given))
        assert answer.texts == answers.read("vllm_model", given, theirs).texts


def _samples(names: list[str]) -> bool:
    """Return whether the LLM API samples with these features."""
    return bool((SAMPLED | {"n", "best_of"}) & {*names})


_EDITS = """
    repetition_penalty presence_penalty frequency_penalty bias bad_words min_tokens stop_words
    stop_token_ids ignore_eos keep_stop special_tokens no_repeat_ngram_size
    allowed_ids dry breakers
"""
GREEDY = [("greedy", *names) for names in cover(_EDITS.split(), lambda *_: True, 5)]


@pytest.mark.parametrize("names", quick_of(GREEDY, GREEDY[:2]), ids="-".join)
def test_greedy_answers_are_those_of_the_definition(house: House, names) -> None:
    """By a model of transformers' and Python's own words for penalties, bans and ends."""
    body = body_of("vllm_model", names)
    inputs, parameters = tensors_of("vllm_model", body)
    request = TEXT.encode_request(vllm_request(inputs, parameters))
    [answer] = answers.read("vllm_model", names, house.ask("vllm_model", body)).texts
    assert answer == plain.answer(request, body["text_input"], "special_tokens" not in names)


PAIRS = [
    (model, first.name, second.name)
    for model in MODELS
    for first, second in combinations(FEATURES, 2)
    if has(model, first.name) and has(model, second.name)
    and refused(model, first.name, second.name)
]  # fmt: skip


@pytest.mark.parametrize(("model", "first", "second"), PAIRS)
def test_a_forbidden_pair_is_refused_by_both_names(house, model, first, second) -> None:
    with pytest.raises(ContractError, match=r"INVALID_ARGUMENT: .* and .*: ") as caught:
        house.ask(model, body_of(model, [first, second]))
    said = str(caught.value)
    assert said.endswith(tuple(pair.reason for pair in refused(model, first, second)))


def test_every_forbidden_pair_has_features_here() -> None:
    keys = {key for feature in FEATURES for key in feature.pair.split()}
    assert {key for pair in pairs.PAIRS for key in (pair.first, pair.second)} <= keys
    assert {key for pair in pairs.PAIRS for key in (pair.first, pair.second)} == {*pairs.FEATURES}
    assert PAIRS


def test_the_page_shows_the_table() -> None:
    text = (ROOT / "docs" / "decoding.md").read_text()
    [shown] = re.findall(r"<!-- pairs: [^>]*-->\n(.*?)\n<!-- end of pairs", text, re.S)
    assert shown == pairs.page(), "put `make pairs` into docs/decoding.md, between its marks"


def test_every_request_of_the_page_works(house: House) -> None:
    text = (ROOT / "docs" / "decoding.md").read_text()
    found = re.findall(r"/v2/models/(\w+)/generate\w* -d '(\{.*?\})'", text, re.S)
    assert len(found) > 8
    for model, written in found:
        body = json.loads(written)
        body |= body.pop("parameters", {})
        assert house.ask(model, body), body


@pytest.fixture(scope="module")
def drafting(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("drafting"), speculation="lookup")
    yield house
    house.engine.check_integrity()
    house.close()


@pytest.mark.parametrize(
    "case", quick_of(CASES, CASES[::60]), ids=["-".join((model, *names)) for model, names in CASES]
)
def test_drafts_change_nothing(house: House, drafting: House, case) -> None:
    answers.same(*case, house.ask, drafting.ask)
