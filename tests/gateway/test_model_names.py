"""Names of models: a deployment's own goes first, a public one that several share is refused."""

from types import SimpleNamespace

import pytest
from slipstream_gateway.errors import ApiError
from slipstream_gateway.models import Models


def models(**public: str) -> Models:
    """Make the models of deployments, each with its public name."""
    made = Models.__new__(Models)
    made._by_name = {
        name: SimpleNamespace(
            deployment=SimpleNamespace(name=name),
            names=(shown, name),
            is_loaded=True,
            adapters=(),
            adapter_of=lambda _: "",
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
