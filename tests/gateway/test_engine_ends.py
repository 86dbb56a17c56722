"""The engine dies under a gateway: streams end with an error, and the next engine serves."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from fixtures.gateway.served import DONE, Gateway, make_repository, serving, wait_ready
from fixtures.server.support import LONG


def engine_of(gateway: Gateway) -> int:
    found = re.findall(r"connected to the engine of \S+, process (\d+)", gateway.log.read_text())
    return int(found[-1])


@pytest.mark.rest
def test_a_killed_engine(long_repository: Path, tmp_path: Path):
    with serving(long_repository, tmp_path / "log") as gateway:
        connection = gateway.connect()
        body = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        before = engine_of(gateway)
        os.kill(before, signal.SIGKILL)
        events = [line[6:] for line in response.read().split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == DONE.encode()
        error = json.loads(events[-2])["error"]
        assert error["type"] == "server_error"
        assert "engine" in error["message"]
        down = gateway.complete(prompt="a", max_tokens=1)
        if down.status != 200:  # the next engine may be up already
            assert down.status == 503
            assert int(down.headers["retry-after-ms"]) > 0
        wait_ready(gateway)
        assert engine_of(gateway) != before
        assert gateway.complete(prompt="a", max_tokens=1).status == 200
        gateway.wait_idle()


@pytest.mark.rest
def test_an_adapter_of_an_engine_that_is_away_is_not_called_unknown(tmp_path: Path):
    (tmp_path / "adapters").mkdir()
    repository = make_repository(tmp_path, adapter_root=str(tmp_path / "adapters"))
    body = {"lora_name": "one"}
    with serving(repository, tmp_path / "log") as gateway:
        assert gateway.post("/v1/unload_lora_adapter", body).status == 404
        os.kill(engine_of(gateway), signal.SIGKILL)
        end_s = time.monotonic() + 60.0
        down = gateway.post("/v1/unload_lora_adapter", body)
        while down.status != 503 and time.monotonic() < end_s:  # until the gateway has noticed
            assert down.status == 404
            down = gateway.post("/v1/unload_lora_adapter", body)
        assert "is not running; it is being restarted" in down.error["message"]
        assert int(down.headers["retry-after-ms"]) > 0
        wait_ready(gateway)
        assert gateway.post("/v1/unload_lora_adapter", body).status == 404
