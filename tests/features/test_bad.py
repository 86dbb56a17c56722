"""Every field's bad values, through schema and engine: refused by the field's name, and alone."""

import pytest
from fixtures.features import answers
from fixtures.features.bad import Bad, bad_bodies
from fixtures.features.house import House
from fixtures.features.table import MODELS, body_of, has
from slipstream_contract.errors import Code, ContractError


@pytest.mark.parametrize("model", MODELS[1:])
def test_each_is_refused_by_its_name_and_the_next_answer_is_what_it_was(house, model) -> None:
    names = ["warm" if has(model, "warm") else "heated", "seed"]
    before = answers.read(model, names, house.ask(model, body_of(model, names)))
    bodies = bad_bodies(model)
    assert len(bodies) > 10
    wrong = [f"{bad.field}: {said}" for bad in bodies if (said := _fault(house, bad))]
    assert wrong == []
    assert answers.read(model, names, house.ask(model, body_of(model, names))) == before


def _fault(house: House, bad: Bad) -> str:
    """Return what is wrong with the refusal of a request; empty: nothing."""
    try:
        house.ask(bad.model, bad.body)
    except ContractError as error:
        said = str(error)
        is_clear = error.code is Code.INVALID_ARGUMENT and bad.field in said and len(said) < 400
        return "" if is_clear else said
    return f"served: {bad.body}"
