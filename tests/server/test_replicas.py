"""Two replicas behind a real server: the text of one engine, and a death that costs nothing."""

import os
import signal
import urllib.request
from pathlib import Path

import pytest
from fixtures.server.support import CHECKPOINT, PROMPT, Client, compose, serving
from fixtures.waiting import wait_for
from slipstream_serve.server import server_directory

pytestmark = [pytest.mark.triton, pytest.mark.slow]
OPTIONS = ("--dtype", "float32", "--kv-cache-tokens", "4096", "--replicas", "2")
BODY = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0}


def metrics_of(server: Client) -> str:
    url = server.server.endpoints.metrics
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.read().decode()


def test_the_same_text_and_an_engine_that_is_killed(client: Client, tmp_path: Path) -> None:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    want = client.generate("ensemble", **BODY)["text_output"]
    assert not client.health()["replicas"]
    repository = compose(CHECKPOINT, tmp_path / "models", *OPTIONS)
    with serving(repository, tmp_path / "log") as server:
        for model in ("ensemble", "tensorrt_llm_bls"):
            assert server.generate(model, **BODY)["text_output"] == want
        first, second = server.health()["replicas"]
        assert first["is_up"]
        assert second["is_up"]
        os.kill(first["engine_pid"], signal.SIGKILL)
        for _ in range(4):  # at once, by the other
            assert server.generate("ensemble", **BODY)["text_output"] == want
        wait_for(lambda: all(each["is_up"] for each in server.health()["replicas"]), 120)
        back = server.health()["replicas"]
        assert [each["num_restarts"] for each in back] == [1, 0]
        assert back[1]["engine_pid"] == second["engine_pid"]
        wait_for(lambda: 'slipstream_replica_restarts_total{replica="0"} 1' in metrics_of(server))
        assert 'slipstream_replica_up{replica="1"} 1' in metrics_of(server)
