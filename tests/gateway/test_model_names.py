"""Names of models: a deployment's own goes first, a public one that several share is refused."""

from types import SimpleNamespace

import pytest
from slipstream.config import EngineConfig
from slipstream_contract.errors import Code, ContractError
from slipstream_gateway.errors import ApiError
from slipstream_gateway.models import Model, Models


def models(away: str = "", **public: str) -> Models:
    """Make the models of deployments, each with its public name; some engines are away."""
    made = Models.__new__(Models)
    made._by_name = {
        name: SimpleNamespace(
            deployment=SimpleNamespace(name=name),
            names=(shown, name),
            is_loaded=True,
            adapters=(),
            adapter_of=lambda _: "",
            may_have_more=name in away,
        )
        for name, shown in public.items()
    }
    return made


def test_a_deployment_is_not_hidden_by_another_ones_public_name():
    found = models(a="chat", chat="small", code="code")
    assert found.find("chat").deployment.name == "chat"
    assert found.find("small").deployment.name == "chat"
    assert found.find("code").deployment.name == "code"


def test_a_public_name_of_several_is_refused_with_their_own():
    found = models(a="same", b="same")
    with pytest.raises(ApiError, match="'same' is the name of several: a, b") as caught:
        found.find("same")
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert found.find("b").deployment.name == "b"


def test_the_names_that_are_listed_are_those_that_are_found():
    found = models(a="same", b="same", c="b", d="only")
    listed = [(model.deployment.name, name) for model, name in found.named()]
    assert listed == [("a", "a"), ("b", "b"), ("c", "c"), ("d", "only"), ("d", "d")]
    assert all(found.find(name).deployment.name == own for own, name in listed)


def test_a_name_that_an_engine_may_know_which_is_away_is_not_called_unknown():
    found = models(away="b", a="chat", b="code")
    with pytest.raises(ContractError, match="engine of code, which may have 'one', is not") as down:
        found.find("one")
    assert (down.value.code, down.value.reason) == (Code.UNAVAILABLE, "engine_down")
    assert found.find("chat").deployment.name == "a"
    with pytest.raises(ApiError, match="'one' does not exist"):
        models(a="chat", b="code").find("one")


@pytest.mark.parametrize(
    ("options", "is_up", "may_have"),
    [
        ({"adapter_root": "/a"}, False, True),
        ({"adapter_dir": "/a"}, False, True),
        ({"adapters": "a=/a"}, False, True),
        ({"adapter_root": "/a"}, True, False),
        ({}, False, False),
    ],
)
def test_an_engine_that_is_away_may_have_adapters_if_it_can_have_any(options, is_up, may_have):
    model = Model.__new__(Model)
    model.config = EngineConfig(checkpoint="", **options)
    model.engine = SimpleNamespace(welcome=lambda: object() if is_up else None)
    assert model.may_have_more == may_have
