"""Drawn faults of ranks on CPUs: whichever rank is killed or stopped, and at whatever event.

All ranks start again, a request has its tokens or an error, and nothing is left behind. To draw
others: `SLIPSTREAM_DRAWS=50 pytest -s tests/faults/test_rank_faults.py`, which prints how long each
fault was unnoticed.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
from fixtures.bridge.launching import CONFIG, Server, pids_of
from fixtures.bridge.replicated import Client
from fixtures.faults.ranks import PROMPTS, faulted, over
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig

pytestmark = pytest.mark.rest
SETTINGS = {"load_format": "random", "device": "cpu", "attention_window": 32, "block_size": 8}
SPLITS = {"tensor": (2, 1), "stages": (1, 2), "both": (2, 2)}
EVENTS = ("idle", "submitted", "first token", "a token", "finished")
DRAWS = int(os.environ.get("SLIPSTREAM_DRAWS", "0"))
SEEDS = [random.randrange(1 << 30) for _ in range(DRAWS)] if DRAWS else [3, 7, 17]


def files_of(server: Server) -> set[str]:
    return {str(path.relative_to(server.runtime.directory)) for path in _all(server)}


def _all(server: Server) -> list[Path]:
    return [path for path in server.runtime.directory.rglob("*") if path.suffix != ".log"]


def descriptors(pid: int) -> list[str]:
    """What a supervisor has open, but for the file of turns, which it opens at each look."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(re.sub(r"\d+", "N", str(entry.readlink())))
    return sorted(each for each in found if not each.endswith(".turns"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_of_a_rank(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    split = rng.choice(list(SPLITS))
    tensor, stages = SPLITS[split]
    sent = [
        (rng.randrange(tensor * stages), rng.choice((signal.SIGKILL, signal.SIGSTOP)), event)
        for event in rng.sample(EVENTS, 2)
    ]
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    config = CONFIG | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ranks = {"tensor_parallel": tensor, "pipeline_parallel": stages, "stuck_after_s": 60}
    server = Server(tmp_path / "run", EngineConfig(checkpoint=str(tmp_path), **SETTINGS, **ranks))
    client = Client(server)
    try:
        assert client.connection.wait_welcome(180), server.runtime.log.read_text()
        want = {number: client.complete(number, prompt) for number, prompt in PROMPTS.items()}
        files, opened = files_of(server), descriptors(server.supervisor)
        for turn, (rank, number, event) in enumerate(sent):
            print(f"seed {seed}: {split}, rank {rank}, {number.name}, {event}", end="", flush=True)
            faulted(server, client, rank, number, event, 2 + 9 * turn)
            over(client, want)
            first = 300 + 100 * turn
            again = {each: client.complete(first + each, PROMPTS[each]) for each in PROMPTS}
            assert again == want
            wait_for(lambda: files_of(server) == files)  # failed starts count for some seconds
            wait_for(lambda: descriptors(server.supervisor) == opened)
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not any(pids_of(server)))
