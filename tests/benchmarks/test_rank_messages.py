"""The way of a step to other ranks, timed on this machine: all arrive, after they were sent."""

import json
import subprocess
import sys

from slipstream_serve.server import repository_root


def test_each_message_is_there_after_it_was_sent_and_before_all_have_met():
    script = repository_root() / "benchmarks" / "rank_messages.py"
    command = [sys.executable, str(script), "--ranks", "2", "3", "--count", "40"]
    done = subprocess.run(
        [*command, "--bytes", "700", "--pause-ms", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for size in (2, 3):
        sent, there, met = (found[f"{size} ranks, {name}"] for name in ("sent", "there", "met"))
        for row in (sent, there, met):
            assert 0 < row[0] <= row[1] <= row[2]
        assert there[0] < met[0]
        assert all(a < b for a, b in zip(sent, met, strict=True))
