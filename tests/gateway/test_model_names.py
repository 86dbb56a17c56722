"""Names of models: a deployment's own goes first, a public one that several share is refused."""

from types import SimpleNamespace

import pytest
from slipstream.config import EngineConfig
from slipstream_contract.errors import Code, ContractError
from slipstream_gateway.errors import ApiError
from slipstream_gateway.models import Model, Models


class Fake(SimpleNamespace):
    """A deployment's model, whose engine may be away."""

    def check_engine(self) -> None:
        if self.adapters is None:
            raise ContractError("it is away", Code.UNAVAILABLE, "engine_down")

    def outage(self) -> str:
        return "it is away"

    def __hash__(self) -> int:
        return id(self)


def models(away: str = "", **public: str) -> Models:
    """Make the models of deployments, each with its public name; some engines are away."""
    made = Models.__new__(Models)
    made._by_name = {
        name: Fake(
            deployment=SimpleNamespace(name=name),
            names=(shown, name),
            is_loaded=True,
            adapters=None if name in away else {},
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
    with pytest.raises(ContractError, match="code may have 'one', but it is away") as down:
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
    model.engine = SimpleNamespace(connection=SimpleNamespace(adapters={} if is_up else None))
    assert (model.adapters is None) == may_have


def test_an_adapter_is_found_with_its_model_at_one_look():
    found = models(a="chat", b="code")
    looks: list[int] = []

    class Leaving(SimpleNamespace):
        """A model whose engine ends as soon as somebody has looked at its adapters."""

        @property
        def adapters(self):
            looks.append(1)
            return {"tuned": None} if len(looks) == 1 else None

    found._by_name["a"] = Leaving(deployment=SimpleNamespace(name="a"), names=("a",), is_loaded=1)
    model, adapter = found.resolve("tuned")
    assert (model.deployment.name, adapter) == ("a", "tuned")
    assert found.resolve("b")[1] == ""


def test_only_models_that_take_requests_now_are_listed():
    found = models(away="b", a="chat", b="code")
    assert [name for _, name in found.served()] == ["chat", "a"]
    with pytest.raises(ContractError, match="it is away") as down:
        models(away="ab", a="chat", b="code").served()
    assert down.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("text", [None, object()])
@pytest.mark.parametrize("unreadable", ["", "no tokenizer"])
@pytest.mark.parametrize("adapters", [None, {}])
def test_a_model_is_listed_if_and_only_if_its_requests_do_not_fail_for_its_engine(
    text: object, unreadable: str, adapters: object
):
    model = Model.__new__(Model)
    model.text, model._fault, model._unreadable = text, "", unreadable
    model._starter = SimpleNamespace(failure=lambda: "", outage=lambda: "it failed twice")
    model.engine = SimpleNamespace(connection=SimpleNamespace(adapters=adapters))
    is_up = adapters is not None and (text is not None or bool(unreadable))
    if is_up:
        model.check_engine()
        return
    said = "it failed twice" if text or unreadable else "not up yet"
    with pytest.raises(ContractError, match=said) as down:
        model.check_engine()
    assert (down.value.code, down.value.reason) == (Code.UNAVAILABLE, "engine_down")
