"""`slipstream bench` on a real server: every model, over gRPC and HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.server.support import CONTEXT
from slipstream_client.cli import main

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]


@pytest.fixture
def bench(idle, tmp_path: Path):
    """Runs the command on the shared server; its exit code and its report."""

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        ends, file = idle.server.endpoints, tmp_path / "report.json"
        ports = ("--grpc-port", str(ends.grpc_port), "--http-port", str(ends.http_port))
        common = ("bench", *ports, "--json", str(file), "--processes", "1", "--warm-up", "2")
        return main([*common, *options]), json.loads(file.read_text())

    return run


@pytest.mark.parametrize(
    ("model", "protocol"),
    [
        (model, protocol)
        for model in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "vllm_model")
        for protocol in ("grpc", "http")
    ],
)
def test_every_token_of_every_model_is_counted(bench, model, protocol):
    options = ("--model", model, "--protocol", protocol, "--requests", "6", "--concurrency", "3")
    code, report = bench(*options, "--input-len", "40", "--output-len", "uniform:5:9")
    [load] = report["loads"]
    assert code == 0
    assert (load["requests"], load["completed"]) == (6, 6)
    assert load["input_tokens"]["mean"] == pytest.approx(
        40, abs=0 if model == "tensorrt_llm" else 8
    )
    assert 5 <= load["output_tokens"]["mean"] <= 9
    assert load["output_tokens"]["max"] <= 9
    total = load["output_tokens"]["mean"] * 6
    assert load["tokens_per_s"] * load["seconds"] == pytest.approx(total, rel=0.01)
    assert 0 < load["ttft_ms"]["p50"] <= load["e2e_ms"]["p50"]
    assert report["target"]["model"] == model


def test_open_loop_in_bursts_by_the_clock(bench):
    options = ("--rates", "20", "--arrivals", "bursts", "--burst", "4", "--seconds", "1.5")
    code, report = bench(
        *options, "--output-len", "4", "--input-len", "8", "--goodput", "e2e:60000"
    )
    [load] = report["loads"]
    assert code == 0
    assert load["requests"] % 4 == 0
    assert load["requests"] == load["completed"] > 0
    assert load["goodput"]["share"] == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_the_server_refuses_as_wrong_has_failed(bench, protocol, capsys):
    options = ("--protocol", protocol, "--requests", "2", "--concurrency", "1", "--warm-up", "0")
    code, report = bench(*options, "--input-len", str(2 * CONTEXT))
    [load] = report["loads"]
    assert code == 1
    assert (load["failed"], load["refused"], load["errors"]) == (2, 0, {"INVALID_ARGUMENT": 2})
    assert "INVALID_ARGUMENT" in capsys.readouterr().err
