"""Benchmark of ranks on CPUs: what four and eight GPUs are to run, but for what needs CUDA."""

import json
import subprocess
import sys

import pytest
from slipstream_serve.server import repository_root

# Ranks of tensors, stages, parts.
CASES = [
    (2, 1, ("sums", "engine", "one", "kill")),
    (1, 2, ("engine",)),
    (4, 1, ("sums", "engine")),
    (4, 1, ("kill",)),
    (8, 1, ("sums",)),
    (8, 1, ("engine",)),
    (2, 2, ("engine",)),
    (2, 2, ("kill",)),
]
SIZES = [8 << 10, 1 << 20]


def measured(tensor: int, pipeline: int, parts: tuple[str, ...]):
    script = repository_root() / "benchmarks" / "tensor_parallel.py"
    ranks = ("--tensor-parallel", tensor, "--pipeline-parallel", pipeline)
    small = ("--tokens", 4, "--prompt", 16, "--requests", 12, "--sizes", *SIZES)
    options = ("--device", "cpu", *ranks, *small, "--parts", *parts, "--limit", 600)
    command = [sys.executable, script, *options]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.rest
@pytest.mark.parametrize(("tensor", "pipeline", "parts"), CASES)
def test_it_measures_every_part_on_ranks_of_a_cpu(tensor, pipeline, parts):
    found = measured(tensor, pipeline, parts)
    size, rows = tensor * pipeline, found["tiny"]
    assert {*rows} == {"engine", "one"} & {*parts}
    if "sums" in parts:
        assert [[row["bytes"] for row in rank] for rank in found["sums"]] == [SIZES] * size
        sums = [row for rank in found["sums"] for row in rank]
        assert all(row["is_right"] and row["us"] > 0 and row["gloo_us"] > 0 for row in sums)
    for ranks in rows.values():
        assert len(ranks) == (1 if ranks is rows.get("one") else size)
        assert min(ranks[0][f"decode_{batch}_ms"] for batch in (1, 4)) > 0
        assert ranks[0]["prompt_tok_s"] > 0
        assert ranks[0]["requests_12_tok_s"] > 0
    if "kill" in parts:
        assert found["kill"]["next_token_s"] > found["kill"]["all_gone_s"] > 0
