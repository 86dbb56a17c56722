"""Faults of ranks on two GPUs under load: killed and stopped, tensor ranks and stages.

`pytest -m gpu -s tests/faults/test_gpu_rank_faults.py` prints how long each fault was unnoticed,
and how long it took until the next engine had served.
"""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from fixtures.bridge.launching import CONFIG, Server, pids_of
from fixtures.bridge.replicated import Client
from fixtures.faults.ranks import PROMPTS, faulted, over
from fixtures.waiting import wait_for
from slipstream.config import EngineConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
SPLITS = {"tensor": (2, 1), "stages": (1, 2)}
FAULTS = [(1, signal.SIGSTOP), (0, signal.SIGSTOP), (1, signal.SIGKILL)]
MOST_S = 5.0  # that a fault may be unnoticed


@pytest.mark.parametrize("split", SPLITS)
def test_a_fault_under_load(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PYTHON", sys.executable)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | MODEL))
    tensor, stages = SPLITS[split]
    config = EngineConfig(
        checkpoint=str(tmp_path),
        load_format="random",
        attention_window=32,
        kv_cache_tokens=8192,
        deterministic=True,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
    )
    server = Server(tmp_path / "run", config)
    client = Client(server)
    try:
        assert client.connection.wait_welcome(180), server.runtime.log.read_text()
        want = {number: client.complete(number, prompt) for number, prompt in PROMPTS.items()}
        for turn, (rank, number) in enumerate(FAULTS):
            print(f"{split}, rank {rank}, {number.name}", end="", flush=True)
            began_s = time.monotonic()
            assert faulted(server, client, rank, number, "a token", 100) < MOST_S
            over(client, want)
            first = 300 + 100 * turn
            assert {each: client.complete(first + each, PROMPTS[each]) for each in PROMPTS} == want
            print(f"{split}: served again after {time.monotonic() - began_s:.2f} s", flush=True)
    finally:
        client.connection.close()
        server.stop()
        wait_for(lambda: not server.supervisor and not any(pids_of(server)))
