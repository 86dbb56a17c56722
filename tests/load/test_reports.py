"""What the load tests report, from numbers that can be checked by hand."""

import importlib
import sys
from types import SimpleNamespace

import pytest
from slipstream_compose.server import repository_root

NAMES = ("serving", "run_perf", "run_locust")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """The scripts as modules; they import each other by their plain names, as they are run."""
    monkeypatch.syspath_prepend(str(repository_root() / "load"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name)


def test_perf_figures(load):
    ms = 1_000_000
    requests = [
        {"timestamp": 0, "response_timestamps": [10 * ms, 20 * ms, 40 * ms]},
        {"timestamp": 1000 * ms, "response_timestamps": [1030 * ms, 2000 * ms]},
        {"timestamp": 5 * ms, "response_timestamps": []},
    ]
    found = load.run_perf.figures(requests, max_tokens=8)
    assert found["requests"] == 2
    assert found["unanswered"] == 1
    assert found["requests_per_s"] == 1.0
    assert found["at_most_tokens_per_s"] == 8.0
    assert found["responses_per_s"] == 2.5
    assert found["ttft_ms"]["p50"] == 20.0
    assert found["between_responses_ms"]["p50"] == 20.0
    assert found["request_ms"]["p50"] == 520.0
    row = load.run_perf.table([{"concurrency": 3} | found]).splitlines()[-1]
    assert row.startswith("| 3 | 2 | 1.0 | 2.5 | 20/")


def test_perf_without_an_answer_is_an_error(load):
    with pytest.raises(SystemExit, match="no request was answered"):
        load.run_perf.figures([{"timestamp": 0, "response_timestamps": []}], max_tokens=1)


def test_requests_name_tensors_that_the_model_has(load):
    from slipstream_contract.tensors import MODELS

    for model in ("ensemble", "tensorrt_llm_bls", "vllm_model"):
        names = {tensor.name for tensor in MODELS[model].inputs}
        for entry in load.run_perf.input_data(model, 8)["data"]:
            assert set(entry) <= names


def test_locust_percentiles_are_those_of_the_histogram(load):
    percentiles = load.run_locust.percentiles
    assert percentiles({}) == {}
    assert percentiles({5.0: 1}) == {"p50_ms": 5.0, "p90_ms": 5.0, "p99_ms": 5.0}
    counts = {float(value): 1 for value in range(1, 101)}
    assert percentiles(counts) == {"p50_ms": 50.0, "p90_ms": 90.0, "p99_ms": 99.0}


def test_locust_rows(load):
    stats = [
        {
            "method": "gRPC",
            "name": "ttft",
            "num_requests": 4,
            "num_failures": 1,
            "response_times": {"3": 3, "9.5": 1},
        }
    ]
    [row] = load.run_locust.rows_of(stats, seconds=2)
    assert row["per_s"] == 2.0
    assert (row["p50_ms"], row["p99_ms"]) == (3.0, 9.5)
    assert load.run_locust.table([row]).splitlines()[1].split()[:2] == ["gRPC", "ttft"]
