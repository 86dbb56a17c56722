"""A gateway of a test ends with the process that has started it, however that ends."""

import subprocess
import sys
from pathlib import Path

from fixtures.bridge.launching import is_alive
from fixtures.waiting import wait_for

STARTER = """
import os, pathlib, sys
from slipstream_serve.gateway_alone import gateway_alone
folder = pathlib.Path(sys.argv[1])
sys.executable = str(folder / "gateway")
with gateway_alone(folder, folder / "log") as (process, address):
    (folder / "pid").write_text(f"{process.pid} {address}")
    os.kill(os.getpid(), 9)
"""
GATEWAY = "#!/bin/sh\necho listening on http://host:1/\nexec sleep 600\n"


def test_it_ends_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    gateway = tmp_path / "gateway"
    gateway.write_text(GATEWAY)
    gateway.chmod(0o755)
    subprocess.run([sys.executable, "-c", STARTER, str(tmp_path)], check=False)
    pid, address = (tmp_path / "pid").read_text().split()
    assert address == "host:1"
    wait_for(lambda: not is_alive(int(pid)), 60)
