"""When the start of a rank is over: from then on it may stand still for seconds alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

from fixtures.models.checkpoints import make_model, save
from fixtures.models.ranks import Group
from slipstream_runtime.ranks import RankMemory

ENGINE = """
import sys
from slipstream.engine import process

class Loop:
    def run(self):
        print(ranks.started()[0], flush=True)
        return 0

def make(config, address, memory_lock, given):
    global ranks
    ranks = given
    print(ranks.started()[0], flush=True)
    return Loop()

sys.exit(process.main(sys.argv[1:], make))
"""


def test_an_engine_starts_until_its_loop_runs(tmp_path: Path) -> None:
    """Adapters that it starts with are read behind the meeting of ranks, from any disk."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"checkpoint": "", "tensor_parallel": 2}))
    descriptor = RankMemory.create(2)
    command = [sys.executable, "-c", ENGINE, "--config", str(config), "--socket", "none"]
    command += ["--ranks", str(descriptor)]
    found = subprocess.run(command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True)
    os.close(descriptor)
    assert (found.returncode, found.stdout) == (0, "False\nTrue\n")


def test_a_meeting_of_ranks_does_not_end_their_starts(tmp_path: Path) -> None:
    group = Group(save(make_model("llama", num_hidden_layers=1), tmp_path), 2)
    assert group.memory.started() == [False, False]
    group.end()
    assert group.errors == []
