"""The bridge's Triton side, with a stand-in for the module that only exists inside the server."""

import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from slipstream_contract.errors import REASONS


class Metric:
    """What the server's page says of it."""

    page: ClassVar[Counter[tuple[str, ...]]] = Counter()

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
    """One without parameters."""

    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return "mine"

    def timeout(self) -> int:
        return 0

    def inputs(self) -> list[Any]:
        return [SimpleNamespace(name=lambda: "x", as_numpy=lambda: np.zeros(1))]


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("triton_python_backend_utils")
    module.MetricFamily = Family
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    for name in ("model", "metrics", "triton"):
        sys.modules.pop(f"slipstream.bridge.{name}", None)


@pytest.mark.usefixtures("utils")
def test_a_request_arrives_by_the_clock_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = importlib.import_module("slipstream.bridge.model").TritonPythonModel()
    questions: list[Any] = []
    model._wiring = SimpleNamespace(begin=questions.append)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    begin_ns = time.monotonic_ns()
    model._begin(Request(), SimpleNamespace(requested=frozenset()))
    [question] = questions
    assert question.request_id == "mine"
    assert begin_ns <= question.arrival_ns <= time.monotonic_ns()


@pytest.mark.usefixtures("utils")
def test_refusals_have_labels_of_a_known_set() -> None:
    metrics = importlib.import_module("slipstream.bridge.metrics")
    refused = Counter([*REASONS, "new", *(f"text of a client {number}" for number in range(9))])
    calls = SimpleNamespace(
        num_calls=0,
        num_responses=0,
        num_tokens=0,
        refused=refused,
        take_first_token_times=list,
    )
    told = metrics.CallMetrics(SimpleNamespace(calls=calls), "bls")
    told.tell()
    told.tell()
    found = {
        key[2]: number for key, number in Metric.page.items() if key[0].endswith("refusals_total")
    }
    assert found == dict.fromkeys(REASONS, 1) | {"other": 11}
