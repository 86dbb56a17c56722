"""The bridge's Triton side, with a stand-in for the module that only exists inside the server."""

import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from slipstream.bridge.tally import Tally
from slipstream_contract.errors import REASONS, ContractError
from slipstream_runtime.inflight import InFlight, count, count_clients


class Metric:
    """A metric that records its value."""

    page: ClassVar[Counter[tuple[str, ...]]] = Counter()  # emptied for each test

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self._key = (name, *labels.values())
        self.page[self._key] = 0

    def increment(self, value: float) -> None:
        self.page[self._key] += value


class Family:
    """A family of metrics."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str], buckets: object = None) -> Metric:  # noqa: N802
        return Metric(self._name, labels)


class Request:
    """A client's request, unless its parameters mark a probe."""

    def __init__(self, parameters: str = "") -> None:
        self._parameters = parameters
        self.sent: list[dict[str, Any]] = []

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return "mine"

    def timeout(self) -> int:
        return 0

    def requested_output_names(self) -> list[str]:
        return []

    def get_response_sender(self) -> Any:
        return SimpleNamespace(send=lambda **response: self.sent.append(response))

    def inputs(self) -> list[Any]:
        return [SimpleNamespace(name=lambda: "x", as_numpy=lambda: np.zeros(1))]


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("triton_python_backend_utils")
    module.MetricFamily = Family
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Metric.page.clear()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    for name in ("model", "metrics", "triton"):
        sys.modules.pop(f"slipstream.bridge.{name}", None)


@pytest.mark.usefixtures("utils")
def test_a_request_arrives_by_the_clock_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = importlib.import_module("slipstream.bridge.model").TritonPythonModel()
    questions: list[Any] = []
    model._wiring = SimpleNamespace(start=questions.append)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    begin_ns = time.monotonic_ns()
    model._start(Request(), SimpleNamespace(requested=frozenset()))
    [question] = questions
    assert question.request_id == "mine"
    assert begin_ns <= question.arrival_ns <= time.monotonic_ns()


@pytest.mark.usefixtures("utils")
@pytest.mark.parametrize(
    ("parameters", "is_probe", "num_asked"),
    [
        ("", False, 1),
        ('{"probe": false}', False, 1),
        ('{"probe": "token"}', True, 1),
        ('{"probe": true}', True, 0),
    ],
)
def test_a_probe_is_distinguished_from_a_client(
    parameters: str, is_probe: bool, num_asked: int, tmp_path: Path
) -> None:
    """A probe in flight is no client's request; its end leaves neither."""
    triton = importlib.import_module("slipstream.bridge.triton")
    model = importlib.import_module("slipstream.bridge.model").TritonPythonModel()
    questions: list[Any] = []
    model._wiring = SimpleNamespace(start=questions.append)
    model._bridge = SimpleNamespace(calls=SimpleNamespace(probes=Tally()))
    path, request = tmp_path / "in-flight", Request(parameters)
    reply = triton.TritonReply(request, InFlight(path))
    model._start(request, reply)
    assert reply.is_probe is is_probe
    assert len(questions) == num_asked
    assert len(request.sent) == model._bridge.calls.probes.num_calls == 1 - num_asked
    assert (count(path), count_clients(path)) == (num_asked, num_asked * (not is_probe))
    if num_asked:
        reply.end()
    assert (count(path), count_clients(path)) == (0, 0)
    assert not any("probe" in question.parameters for question in questions)


@pytest.mark.usefixtures("utils")
def test_refused_probes_are_no_refusals_of_clients() -> None:
    metrics = importlib.import_module("slipstream.bridge.metrics")
    calls = SimpleNamespace(clients=Tally(), probes=Tally())
    for _ in range(3):
        calls.probes.count_refusal(ContractError("no"))
    metrics.CallMetrics(SimpleNamespace(calls=calls), "bls").publish()
    page = {key[0]: number for key, number in Metric.page.items() if number}
    assert page == {"slipstream_probe_refusals_total": 3}


@pytest.mark.usefixtures("utils")
def test_refusals_have_labels_of_a_known_set() -> None:
    metrics = importlib.import_module("slipstream.bridge.metrics")
    refused = Counter([*REASONS, "new", *(f"text of a client {number}" for number in range(9))])
    calls = SimpleNamespace(clients=Tally(), probes=Tally())
    calls.clients.refused = refused
    told = metrics.CallMetrics(SimpleNamespace(calls=calls), "bls")
    told.publish()
    told.publish()
    found = {
        key[2]: number
        for key, number in Metric.page.items()
        if key[0] == "slipstream_refusals_total"
    }
    assert found == dict.fromkeys(REASONS, 1) | {"other": 11}
