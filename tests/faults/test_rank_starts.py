"""Drawn faults of ranks that start, on CPUs: killed or stopped at any moment, whichever rank.

It is noticed and named, all ranks are started again and serve, and nothing is left behind. To draw
others: `SLIPSTREAM_DRAWS=50 pytest -s tests/faults/test_rank_starts.py`.
"""

import contextlib
import os
import random
import re
import signal
from pathlib import Path

import pytest
from fixtures.bridge.launching import Server, is_alive, pids_of
from fixtures.bridge.replicated import Client
from fixtures.faults.starting import HANG, MOMENTS, order, write_python
from fixtures.models.checkpoints import make_model, save
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig
from slipstream.launch import SupervisorStarter

pytestmark = pytest.mark.rest
SPLITS = {"tensor": (2, 1), "stages": (1, 2)}
PROMPT = [3, 1, 4, 1, 5]
DRAWS = int(os.environ.get("SLIPSTREAM_DRAWS", "0"))
SEEDS = [random.randrange(1 << 30) for _ in range(DRAWS)] if DRAWS else [1, 5, 9, 10, 16, 19, 21]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "orders"
    folder.mkdir()
    write_python(tmp_path / "python", folder)
    monkeypatch.setenv("SLIPSTREAM_PYTHON", str(tmp_path / "python"))
    return folder


def config_of(checkpoint: Path, split: str) -> EngineConfig:
    tensor, stages = SPLITS[split]
    return EngineConfig(
        checkpoint=str(checkpoint),
        device="cpu",
        block_size=8,
        kv_cache_tokens=256,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
    )


def is_named(log: str, rank: int, number: signal.Signals) -> bool:
    """Whether the log names the rank, and, of one that hangs, less than 5 s without a sign."""
    if number is signal.SIGKILL:
        return re.search(rf"rank {rank} \(pid \d+\) ended with code -9", log) is not None
    found = re.search(rf"rank {rank} \(pid \d+\) gave no sign of life for ([\d.]+) s", log)
    return found is not None and float(found[1]) < 5.0


def shared_by(pids: list[int]) -> set[str]:
    """The named shared memory that processes have mapped."""
    found = set()
    for pid in filter(None, pids):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.split()[-1] for line in lines if " /dev/shm/" in line}
    return found


def engine_of(client: Client) -> int:
    """The engine that the client is connected to; 0: none."""
    welcome = client.connection.wait_welcome(0)
    return 0 if welcome is None else welcome.engine_pid


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_in_a_start(seed: int, tmp_path: Path, checkpoint: Path, orders: Path) -> None:
    rng = random.Random(seed)
    split, rank = rng.choice(list(SPLITS)), rng.randrange(2)
    number, moment = rng.choice((signal.SIGKILL, signal.SIGSTOP)), rng.choice(MOMENTS)
    print(f"seed {seed}: {split}, rank {rank}, {number.name}, {moment}", flush=True)
    server = Server(tmp_path / "run", config_of(checkpoint, split))
    file = order(orders, moment, rank, number)
    client = Client(server)
    try:
        before = 0
        if moment == "first step":
            wait_for(lambda: engine_of(client))
            before = engine_of(client)
            client.submit(1, PROMPT)
        wait_for(lambda: not file.exists())
        pids = pids_of(server)
        shared = shared_by(pids)
        wait_for(lambda: is_named(server.runtime.log.read_text(), rank, number))
        wait_for(lambda: not any(map(is_alive, filter(None, pids))))
        wait_for(lambda: engine_of(client) not in (0, before))
        assert len(client.complete(2, PROMPT)) == 4
        assert not server.runtime.error.exists()
        shared |= shared_by(pids_of(server))
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not any(pids_of(server)))
    assert not any(map(os.path.exists, shared))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_while_it_gives_signs_of_life(
    rank: int, tmp_path: Path, checkpoint: Path, orders: Path
) -> None:
    """The first thread hangs on a pipe in the midst of a step; the thread that gives signs goes on.

    A step may take 60 s here; what has hung is noticed by its standing still.
    """
    server = Server(tmp_path / "run", config_of(checkpoint, "tensor"))
    client = Client(server)
    try:
        wait_for(lambda: engine_of(client))
        before = engine_of(client)
        file = order(orders, "first step", rank, HANG)
        client.submit(1, PROMPT)
        wait_for(lambda: not file.exists())
        pids = pids_of(server)
        said = re.compile(rf"rank {rank} \(pid {pids[rank]}\) stood still for ([\d.]+) s")
        wait_for(lambda: said.search(server.runtime.log.read_text()))
        found = said.search(server.runtime.log.read_text())
        assert found is not None
        assert float(found[1]) < 5.0
        wait_for(lambda: engine_of(client) not in (0, before))
        assert len(client.complete(2, PROMPT)) == 4
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not any(pids_of(server)))


def test_a_rank_that_never_starts_is_given_up_by_name(
    tmp_path: Path, checkpoint: Path, orders: Path
) -> None:
    server = Server(tmp_path / "run", config_of(checkpoint, "tensor"))
    order(orders, "interpreter", 1, signal.SIGKILL, is_each=True)
    bridge: SupervisorStarter = server.supervisions[1]
    server.supervisions[0].ensure()
    wait_for(lambda: bridge.failure() is not None)
    assert re.search(r"rank 1 \(pid \d+\) ended with code -9$", bridge.failure() or "")
    server.stop()
    wait_for(lambda: not server.supervisor and not any(pids_of(server)))
