"""Sums over two GPUs and more, in processes of their own, and a model on two ranks."""

import json
import subprocess
import sys

import pytest
import torch
from slipstream_serve.server import repository_root

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two NVIDIA GPUs"),
]
SIZES = (16, 8192, 65_536, 262_144, 262_160, 1 << 20, 8 << 20, 12 << 20)


def test_sums_have_the_oracles_bits_and_a_model_runs_on_two_ranks() -> None:
    """And with one of them killed, all start again."""
    script = repository_root() / "benchmarks" / "tensor_parallel.py"
    options = (
        "--tensor-parallel",
        "2",
        "--models",
        "tiny",
        "--batches",
        "1",
        "8",
        "--tokens",
        "16",
    )
    parts = ("--prompt", "600", "--parts", "sums", "engine", "kill", "--sizes", *map(str, SIZES))
    result = subprocess.run(
        [sys.executable, str(script), *options, *parts],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert all(row["is_right"] for rank in found["sums"] for row in rank)
    assert found["tiny"]["engine"][0]["decode_8_ms"] > 0
