"""The supervisor of rank 0 and `slipstream rank` of another host, on two loopback addresses."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.bridge.hosts import free_port, other_host, variables
from fixtures.bridge.launching import CONFIG, Server, is_alive, wait_for
from fixtures.bridge.replicated import Client
from slipstream import launch
from slipstream.config import EngineConfig
from slipstream_serve.server import repository_root

pytestmark = [pytest.mark.rest, pytest.mark.timeout(900)]
SETTINGS = {"load_format": "random", "device": "cpu", "block_size": 8}
TENSOR, PIPELINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def repository(folder: Path, split: dict[str, int], **config: object) -> Path:
    """A model repository with an engine, and its checkpoint."""
    model = folder / "models" / "tensorrt_llm"
    (model / "1" / "checkpoint").mkdir(parents=True)
    shutil.copy(repository_root() / "model_repository/tensorrt_llm/config.pbtxt", model)
    (model / "1" / "checkpoint" / "config.json").write_text(
        json.dumps(CONFIG | {"num_hidden_layers": 2} | config)
    )
    engine = {"checkpoint": "checkpoint", **SETTINGS, **split}
    (model / "1" / "model.json").write_text(json.dumps({"wiring": "composed", "engine": engine}))
    return folder / "models"


def config_of(models: Path, split: dict[str, int]) -> EngineConfig:
    checkpoint = str(models / "tensorrt_llm/1/checkpoint")
    return EngineConfig(checkpoint=checkpoint, **SETTINGS, **split)


def ranks_of(agent: int) -> list[int]:
    """The processes that an agent has started."""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return [int(pid) for pid in found if is_alive(int(pid))]
    return []


def text_of_one_host(folder: Path, models: Path, split: dict[str, int]) -> list[int]:
    server = Server(folder, config_of(models, split))
    client = Client(server)
    try:
        assert client.connection.wait_welcome(180), server.runtime.log.read_text()
        return client.complete(1, PROMPT)
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine and not server.rank)


@pytest.mark.parametrize(
    ("split", "has_faults"),
    [
        (TENSOR, False),
        pytest.param(PIPELINE, False, marks=pytest.mark.slow),
        pytest.param(TENSOR, True, marks=pytest.mark.slow),
    ],
    ids=["tensor", "pipeline", "faults"],
)
def test_ranks_of_two_hosts_serve_and_a_lost_one_is_named(tmp_path, monkeypatch, split, has_faults):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    models = repository(tmp_path, split)
    want = text_of_one_host(tmp_path / "one", models, split)
    port, log = free_port(), tmp_path / "log"
    for name, value in variables(0, 2, port).items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "run", config_of(models, split))
    client = Client(server)

    def said(words: str) -> bool:
        return words in server.runtime.log.read_text()

    def serve(number: int) -> None:
        assert client.connection.wait_welcome(180), server.runtime.log.read_text()
        assert client.complete(number, PROMPT) == want

    def lose(agent: int, pid: int, number: int) -> None:
        os.kill(pid, number)
        wait_for(lambda: client.connection.wait_welcome(0) is None)  # 5 s on a machine at rest
        wait_for(lambda: pid not in ranks_of(agent))

    try:
        with other_host(models, 1, 2, port, log) as agent:
            serve(1)
            if not has_faults:
                return
            lose(agent, ranks_of(agent)[0], signal.SIGKILL)
            wait_for(lambda: said("rank 1 on host-1 ended with code -9"))
            serve(2)
            lose(agent, ranks_of(agent)[0], signal.SIGSTOP)
            wait_for(lambda: said("rank 1 on host-1 "))
            serve(3)
        wait_for(lambda: client.connection.wait_welcome(0) is None)
        wait_for(lambda: said("host host-1 (ranks 1 to 1) is gone"))
        with other_host(models, 1, 2, port, log):
            serve(4)
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine)


def test_rank_0_has_time_to_say_why_another_rank_has_refused(monkeypatch):
    """Both compare; what comes first is no reason to end the one that has the words."""
    monkeypatch.setattr(launch, "_WORDS_S", 120.0)
    engine = subprocess.Popen(["sh", "-c", "sleep 0.2; exit 2"])
    ranks = SimpleNamespace(code=lambda quiet: quiet)
    assert launch._code_of(engine, ranks) == launch.CANNOT_START
    assert engine.wait() == 2


def test_another_checkpoint_is_refused_with_host_and_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    (tmp_path / "other").mkdir()
    models, others = (
        repository(tmp_path, TENSOR),
        repository(tmp_path / "other", TENSOR, rope_theta=1.0),
    )
    port, log = free_port(), tmp_path / "log"
    for name, value in variables(0, 2, port).items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "run", config_of(models, TENSOR))
    server.supervisions[0].ensure()
    words = "rank 1 on host-1 has another files of the checkpoint than rank 0"
    with other_host(others, 1, 2, port, log) as agent:
        wait_for(lambda: server.supervisions[1].failure() is not None)
        wait_for(lambda: not is_alive(agent))
    assert words in server.runtime.error.read_text()
    assert words in log.read_text()
    server.stop()
    wait_for(lambda: not server.supervisor)
