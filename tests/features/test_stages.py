"""Features of requests meet ranks: two stages, and two tensor ranks, answer as one process does."""

from collections.abc import Iterator

import pytest
from fixtures.features import answers
from fixtures.features.house import House, staged_house
from fixtures.features.pairing import cases
from fixtures.features.table import MODELS, body_of
from fixtures.tiers import quick_of

ALL = [(model, case) for model in MODELS[1:] for case in cases(model)]
CASES, RANK_CASES = ALL[::4], ALL[1::4]


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Iterator[House]:
    with staged_house(tmp_path_factory.mktemp("staged")) as house:
        yield house


@pytest.fixture(scope="module")
def ranked(tmp_path_factory) -> Iterator[House]:
    ranks = {"pipeline_parallel": 1, "tensor_parallel": 2}
    with staged_house(tmp_path_factory.mktemp("ranked"), **ranks) as house:
        yield house


def ids_of(cases: list) -> list[str]:
    return ["-".join((model, *names)) for model, names in cases]


@pytest.mark.parametrize("case", quick_of(CASES, CASES[::16]), ids=ids_of(CASES))
def test_stages_change_nothing(house: House, staged: House, case) -> None:
    model, names = case
    answer = answers.same(model, names, house.ask, staged.ask)
    answers.check(model, names, answer, staged.ask(model, body_of(model, names)))


@pytest.mark.parametrize("case", quick_of(RANK_CASES, RANK_CASES[::16]), ids=ids_of(RANK_CASES))
def test_tensor_ranks_change_nothing(house: House, ranked: House, case) -> None:
    model, names = case
    answer = answers.same(model, names, house.ask, ranked.ask)
    answers.check(model, names, answer, ranked.ask(model, body_of(model, names)))
