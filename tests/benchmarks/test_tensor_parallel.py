"""Benchmark of ranks on CPUs: what four and eight GPUs are to run, but for what needs CUDA."""

import json
import subprocess
import sys

import pytest
from fixtures.bridge.launching import is_alive
from fixtures.scripts import scripts
from fixtures.waiting import wait_for
from slipstream_serve.server import repository_root

FOLDER = repository_root() / "benchmarks"
FORKED = repository_root() / "tests" / "fixtures" / "forked.py"
NAMES = ("shapes", "step", "tensor_parallel")

# Ranks of tensors, stages, parts.
CASES = [
    (2, 1, ("sums", "engine", "one", "kill")),
    (1, 2, ("engine",)),
    (4, 1, ("engine", "kill")),
    (8, 1, ("sums", "engine")),
    (2, 2, ("engine", "kill")),
]
SIZES = [8 << 10, 1 << 20]


def measured(tensor: int, pipeline: int, parts: tuple[str, ...]):
    script = FOLDER / "tensor_parallel.py"
    ranks = ("--tensor-parallel", tensor, "--pipeline-parallel", pipeline)
    small = ("--tokens", 4, "--prompt", 16, "--requests", 12, "--sizes", *SIZES)
    options = ("--device", "cpu", *ranks, *small, "--parts", *parts, "--limit", 600)
    forked = (FORKED, "tensor_parallel_rank") if tensor > 1 else ()  # one case starts all anew
    command = [sys.executable, *forked, script, *options]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.rest
@pytest.mark.timeout(3000)  # each part has a limit of its own
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


def test_a_rank_that_fails_behind_its_figures_has_measured_nothing(tmp_path):
    with scripts(FOLDER, NAMES) as made:
        ranks = made.tensor_parallel.Ranks.__new__(made.tensor_parallel.Ranks)
        ranks.outputs = [tmp_path / "0", tmp_path / "1"]
        for output in ranks.outputs:
            output.write_text("{}")
        ranks.processes = [subprocess.Popen([command]) for command in ("true", "false")]
        for process in ranks.processes:
            process.wait()
        assert ranks.wait(60) == "rank 1 failed"


KILLED = """
import argparse, os, pathlib, sys, tensor_parallel as made
sys.executable = sys.argv[1]
args = argparse.Namespace(
    device="cpu", tokens=1, prompt=1, requests=1, batches=[1], sizes=[1]
)
ranks = made.Ranks(args, "serve", 2, pathlib.Path(sys.argv[1]))
print(*(each.pid for each in ranks.processes), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.rest
def test_ranks_end_with_a_benchmark_that_is_killed(tmp_path):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    command = [sys.executable, "-c", KILLED, str(sleeper)]
    with (tmp_path / "said").open("w") as said:  # no pipe, which ranks that stay would hold open
        subprocess.run(command, cwd=FOLDER, stdout=said, stderr=said, check=False)
    pids = [int(word) for word in (tmp_path / "said").read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
