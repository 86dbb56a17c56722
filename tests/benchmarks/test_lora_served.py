"""The benchmark of served adapters ends when its time is up, with both rows."""

import json
import subprocess
import sys

import pytest
from slipstream_serve.server import repository_root


@pytest.mark.rest
def test_loads_and_a_storm_end_in_time_with_their_rows():
    script = repository_root() / "benchmarks" / "lora_served.py"
    options = {
        "adapters": 12,
        "drawn": 2,
        "pool": 4,
        "users": 3,
        "prompt": 4,
        "output": 4,
        "streams": 2,
        "seconds": 0.1,
        "warm-seconds": 0.1,
        "rounds": 1,
        "loads": 2,
        "between": 6,
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, str(script), *given],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    table = json.loads(done.stdout.splitlines()[-1])["table"]
    assert table["load"]["ms"] > 0
    storm = table["storm"]
    assert storm["loads"] >= storm["evictions"]
    assert 0.5 < storm["share"] / (storm["share_of_rows"] * storm["share_of_steps"]) < 2
