"""Features of requests meet the stages of a pipeline: two of them answer as one process does."""

from collections.abc import Iterator

import pytest
from fixtures.features import answers
from fixtures.features.house import House, staged_house
from fixtures.features.pairing import cases
from fixtures.features.table import MODELS, body_of
from fixtures.tiers import quick_of

CASES = [(model, case) for model in MODELS[1:] for case in cases(model)][::4]


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.close()


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Iterator[House]:
    with staged_house(tmp_path_factory.mktemp("staged")) as house:
        yield house


@pytest.mark.parametrize(
    "case", quick_of(CASES, CASES[::16]), ids=["-".join((model, *names)) for model, names in CASES]
)
def test_stages_change_nothing(house: House, staged: House, case) -> None:
    model, names = case
    answer = answers.same(model, names, house.ask, staged.ask)
    answers.check(model, names, answer, staged.ask(model, body_of(model, names)))
