"""The supervisor of several ranks."""

import os
import signal
import sys

import pytest
from fixtures.bridge.launching import Server, is_alive, wait_lost
from fixtures.models.checkpoints import edit_config
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_live_and_die_together(field, tmp_path, checkpoint, monkeypatch):
    """A rank that is killed, and one that is stopped, cost a start of all; none is left behind."""
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    edit_config(checkpoint, num_hidden_layers=2)
    settings = {"load_format": "random", "device": "cpu", field: 2}
    server = Server(tmp_path / "run", EngineConfig(checkpoint=str(checkpoint), **settings))
    connection = server.connect()
    try:
        seen = []
        for number in (signal.SIGKILL, signal.SIGSTOP, None):
            welcome = connection.wait_welcome(180)
            assert welcome is not None, server.runtime.log.read_text()
            assert welcome.engine_pid not in seen
            seen += [welcome.engine_pid, server.rank]
            if number is None:
                break
            os.kill(server.rank, number)
            wait_lost(connection, welcome.engine_pid)  # 5 s on a machine at rest
            wait_for(lambda gone=tuple(seen): not any(is_alive(pid) for pid in gone))
        assert "gave no sign of life for" in server.runtime.log.read_text()
    finally:
        connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine and not server.rank)


@pytest.mark.rest
def test_a_model_that_ranks_cannot_share_is_refused(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    settings = {"load_format": "random", "device": "cpu", "tensor_parallel": 4}
    server = Server(tmp_path / "run", EngineConfig(checkpoint=str(checkpoint), **settings))
    server.supervisions[0].ensure()
    wait_for(lambda: server.supervisions[1].failure() is not None)
    assert server.runtime.error.read_text() == (
        "tensor_parallel = 4: num_attention_heads = 2 is no multiple of it\n"
    )
    server.stop()
    wait_for(lambda: not server.supervisor and not server.rank)
