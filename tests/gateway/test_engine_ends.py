"""The engine dies under a gateway: streams end with an error, and the next engine serves."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from fixtures.gateway.served import DONE, Gateway, serving, wait_ready
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
