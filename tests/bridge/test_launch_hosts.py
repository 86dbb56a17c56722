"""The supervisor of rank 0 and `slipstream rank` of another host, on two loopback addresses."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.bridge import of_torchrun
from fixtures.bridge.hosts import ADDRESS, other_host, variables
from fixtures.bridge.launching import CONFIG, Server, is_alive
from fixtures.bridge.replicated import Client
from fixtures.faults.starting import order, write_python
from fixtures.ports import held_port
from fixtures.waiting import wait_for
from slipstream import launch
from slipstream.config import EngineConfig
from slipstream_runtime.directory import Runtime
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


@pytest.fixture
def port() -> Iterator[int]:
    """A port of the host of rank 0, held for the whole test."""
    with held_port(ADDRESS) as number:
        yield number


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
def test_ranks_of_two_hosts_serve_and_a_lost_one_is_named(
    tmp_path, monkeypatch, port, split, has_faults
):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    models = repository(tmp_path, split)
    want = text_of_one_host(tmp_path / "one", models, split)
    log = tmp_path / "log"
    for name, value in variables(0, 2, port).items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "run", config_of(models, split))
    client = Client(server)

    def said(words: str, begin: int = 0) -> bool:
        return words in server.runtime.log.read_text()[begin:]

    def serve(number: int) -> None:
        assert client.connection.wait_welcome(180), server.runtime.log.read_text()
        assert client.complete(number, PROMPT) == want

    def lose(agent: int, number: int, words: str) -> None:
        begin, [pid] = len(server.runtime.log.read_text()), ranks_of(agent)
        welcome = client.connection.wait_welcome(0)
        os.kill(pid, number)
        wait_for(lambda: client.connection.wait_welcome(0) != welcome)  # a client may see no gap
        wait_for(lambda: pid not in ranks_of(agent))
        wait_for(lambda: said(words, begin))

    try:
        with other_host(models, 1, 2, port, log) as agent:
            serve(1)
            if not has_faults:
                return
            lose(agent, signal.SIGKILL, "rank 1 on host-1 ended with code -9")
            serve(2)
            lose(agent, signal.SIGSTOP, "rank 1 on host-1 ")  # silent, or killed by its agent
            serve(3)
        wait_for(lambda: client.connection.wait_welcome(0) is None)
        wait_for(lambda: said("host host-1 (ranks 1 to 1) is gone"))
        with other_host(models, 1, 2, port, log):
            serve(4)
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine)


@pytest.mark.parametrize(
    ("moment", "number"), [("rendezvous", signal.SIGSTOP), ("cache", signal.SIGKILL)]
)
def test_a_fault_in_the_start_of_another_host(tmp_path, monkeypatch, port, moment, number):
    """The host itself sees that its rank does nothing; rank 0's names it, and all start again."""
    orders, python = tmp_path / "orders", tmp_path / "python"
    orders.mkdir()
    write_python(python, orders)
    monkeypatch.setenv("SLIPSTREAM_PYTHON", str(python))
    models = repository(tmp_path, TENSOR)
    log = tmp_path / "log"
    for name, value in variables(0, 2, port).items():
        monkeypatch.setenv(name, value)
    order(orders, moment, 1, number)
    server = Server(tmp_path / "run", config_of(models, TENSOR))
    client = Client(server)
    try:
        with other_host(models, 1, 2, port, log, str(python)):
            assert client.connection.wait_welcome(180), server.runtime.log.read_text()
            assert len(client.complete(1, PROMPT)) == 4
            assert "rank 1 on host-1 ended with code -9" in server.runtime.log.read_text()
            silent = "rank 1 on host-1 gave no sign of life" in log.read_text()
            assert silent == (number is signal.SIGSTOP)
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not server.engine and not server.rank)
    with socket.create_server((ADDRESS, port)):
        pass  # nothing listens there any more


def test_rank_0_has_time_to_say_why_another_rank_has_refused(monkeypatch):
    """Both compare; what comes first is no reason to end the one that has the words."""
    monkeypatch.setattr(launch, "WORDS_S", 120.0)
    engine = subprocess.Popen(["sh", "-c", "sleep 0.2; exit 2"])
    ranks = SimpleNamespace(code=lambda quiet: quiet, size=2)
    assert launch._code_of(engine, ranks) == launch.CANNOT_START
    assert engine.wait() == 2


def test_why_an_engine_cannot_start_is_found_among_the_lines_of_others_that_end(tmp_path):
    runtime = Runtime(tmp_path)
    supervisor = launch.Supervisor(runtime, -1, os.getpid())
    assert supervisor._why(runtime.log.write_text("before\n")) == "it said nothing"
    with runtime.log.open("a") as log:
        log.write("launch ERROR the first line\nlaunch ERROR rank 1 ended with code 2\n\n")
    assert supervisor._why(7) == "launch ERROR rank 1 ended with code 2"
    with runtime.log.open("a") as log:
        log.write("slipstream engine: no such file\nlaunch ERROR rank 1 ended with code 2\n")
    assert supervisor._why(7) == "no such file"


def test_another_checkpoint_is_refused_with_host_and_rank(tmp_path, monkeypatch, port):
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    (tmp_path / "other").mkdir()
    models, others = (
        repository(tmp_path, TENSOR),
        repository(tmp_path / "other", TENSOR, rope_theta=1.0),
    )
    log = tmp_path / "log"
    for name, value in variables(0, 2, port).items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path / "run", config_of(models, TENSOR))
    server.supervisions[0].ensure()
    words = "rank 1 on host-1 has another config.json of the checkpoint than rank 0"
    with other_host(others, 1, 2, port, log) as agent:
        wait_for(lambda: server.supervisions[1].failure() is not None)
        wait_for(lambda: not is_alive(agent))
    assert words in server.runtime.error.read_text()
    assert words in log.read_text()
    server.stop()
    wait_for(lambda: not server.supervisor)


def test_torchrun_itself_starts_them(tmp_path, monkeypatch):
    """torchrun listens at MASTER_PORT for its own ranks, and ends them all when one does."""
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    models = repository(tmp_path, TENSOR)
    want = text_of_one_host(tmp_path / "one", models, TENSOR)
    script = Path(of_torchrun.__file__)
    ranks = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", str(script)]
    found = tmp_path / "run"
    log = (tmp_path / "log").open("wb")
    path = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, *ranks, str(found), str(models), json.dumps(PROMPT)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
    ) as process:
        try:
            wait_for(lambda: (found / "tokens").exists() or process.poll() is not None)
        finally:
            process.terminate()
    assert (found / "tokens").exists(), (tmp_path / "log").read_text()
    assert json.loads((found / "tokens").read_text()) == want
