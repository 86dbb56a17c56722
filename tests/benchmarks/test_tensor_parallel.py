"""Benchmark of ranks on CPUs: sums are right, and steps are made."""

import json
import subprocess
import sys

import pytest
from slipstream_serve.server import repository_root


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_it_measures_two_ranks_of_a_cpu(kind):
    script = repository_root() / "benchmarks" / "tensor_parallel.py"
    options = (f"--{kind}-parallel", "2", "--device", "cpu", "--batches", "1", "--tokens", "2")
    parts = ("--prompt", "8", "--sizes", "8192", "--parts", "sums", "engine")
    result = subprocess.run(
        [sys.executable, str(script), *options, *parts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    if kind == "tensor":
        assert [row["is_right"] for rank in found["sums"] for row in rank] == [True, True]
    assert found["tiny"]["engine"][0]["decode_1_ms"] >= 0
