"""Replicas under load on this machine: every request ends, but those of a killed engine."""

import json
import subprocess
import sys

import pytest
from slipstream_serve.server import repository_root


@pytest.mark.rest
def test_a_killed_replica_takes_its_own_streams_alone():
    script = repository_root() / "benchmarks" / "replicas_served.py"
    command = [sys.executable, str(script), "--device", "cpu", "--replicas", "2"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--requests", "8", "--streams", "16"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["in"], row["out"]) for row in rows[:-1]] == [(128, 128), (1024, 64)]
    assert all(row["tok_s"] > 0 for row in rows[:-1])
    killed = rows[-1]["killed"]
    assert killed["lost"] < killed["streams"] == 16  # those without a token go to the other one
    assert killed["later_lost"] == 0
