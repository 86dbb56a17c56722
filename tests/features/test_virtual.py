"""Adapters meet features and stages: LoRA, and virtual tokens by their rows or by their keys."""

from collections.abc import Iterator

import pytest
from fixtures.features import answers
from fixtures.features.adapters import with_adapter, write, write_virtual
from fixtures.features.house import House, staged_house
from fixtures.features.pairing import cases
from fixtures.features.table import body_of
from fixtures.tiers import quick_of
from slipstream_contract.errors import ContractError

MODEL = "vllm_model"
CASES = cases(MODEL)
NAMES = ("lora", "rows", "keys")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("adapters")
    rows, keys = write_virtual(folder, "import os\nimport sys\n\n\n")
    found = zip(NAMES, (write(folder / "lora", 1), rows, keys), strict=True)
    return ",".join(f"{name}={path}" for name, path in found)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, adapters: str) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("house"), adapters=adapters)
    yield made
    made.close()


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, adapters: str) -> Iterator[House]:
    with staged_house(tmp_path_factory.mktemp("staged"), adapters=adapters) as made:
        yield made


def ask(house: House, names: tuple[str, ...], adapter: str) -> tuple[list[str], list[int]] | str:
    """The texts of an adapter, and their lengths, or why there are none."""
    try:
        responses = house.ask(MODEL, with_adapter(body_of(MODEL, names), adapter))
    except ContractError as error:
        assert "prompt_log_probs" in names
        return error.message
    found = answers.read(MODEL, names, responses)
    answers.check(MODEL, names, found, responses)
    return found.texts, found.num_tokens


@pytest.mark.parametrize("names", quick_of(CASES, CASES[::32]), ids="-".join)
def test_keys_of_tokens_say_what_their_rows_say_beside_every_feature(
    house: House, names: tuple[str, ...]
) -> None:
    rows = ask(house, names, "rows")
    assert ask(house, names, "keys") == rows
    if isinstance(rows, str):
        assert rows == "prompt_logprobs: virtual tokens have no log probs"


def log_probs(house: House, adapter: str) -> list[float]:
    names = ("greedy", "log_probs")
    responses = house.ask(MODEL, with_adapter(body_of(MODEL, names), adapter))
    [found] = answers.read(MODEL, names, responses).log_probs
    return found


def test_keys_stand_where_their_rows_stand(house: House, staged: House) -> None:
    """Keys turned by another position may give the same text, but no such log probs."""
    expected = log_probs(house, "rows")
    for each in (house, staged):
        assert log_probs(each, "keys") == pytest.approx(expected, abs=1e-3)


def test_each_says_something_else(house: House) -> None:
    assert len({str(ask(house, ("greedy",), name)) for name in ("", "lora", "rows")}) == 3


@pytest.mark.parametrize("adapter", NAMES)
@pytest.mark.parametrize("names", quick_of(CASES[1::4], CASES[1::64]), ids="-".join)
def test_stages_change_nothing_of_an_adapter(
    house: House, staged: House, names: tuple[str, ...], adapter: str
) -> None:
    assert ask(staged, names, adapter) == ask(house, names, adapter)
