"""What the processes of a server leave open to others, and behind."""

import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile

from slipstream_runtime.directory import GATEWAY, Runtime, hide_shared_memory
from slipstream_runtime.processes import identity, in_group


def test_what_a_process_has_mapped_of_shared_memory_is_its_users_alone():
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="slipstream test ") as ours,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as unmapped,
        tempfile.NamedTemporaryFile() as elsewhere,
    ):
        for file in (ours, unmapped, elsewhere):
            file.write(b"x" * 10)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
        with mmap.mmap(ours.fileno(), 10), mmap.mmap(elsewhere.fileno(), 10):
            hide_shared_memory()
        modes = [
            stat.S_IMODE(os.fstat(file.fileno()).st_mode) for file in (ours, unmapped, elsewhere)
        ]
        assert modes == [0o600, 0o644, 0o644]


LEADER = """
import subprocess
own = subprocess.Popen(["sleep", "60"], env={})
away = subprocess.Popen(["sleep", "60"], process_group=0)
print(own.pid, away.pid, flush=True)
own.wait()
"""


def test_a_group_is_its_live_processes():
    """Environments do not count: here, the processes have none."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert leader.stdout is not None
    own, away = map(int, leader.stdout.readline().split())
    try:
        assert set(in_group(leader.pid)) == {leader.pid, own}
        assert in_group(away) == [away]
        leader.kill()
        leader.wait()
        assert in_group(leader.pid) == [own]
    finally:
        for pid in (own, away):
            os.kill(pid, signal.SIGKILL)


def test_no_other_process_has_the_same_name():
    first, second = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        names = [identity(pid) for pid in (first.pid, first.pid, second.pid, os.getpid())]
        assert names[0] == names[1]
        assert len(set(names)) == 3
        assert names[0].startswith(f"{first.pid}-")
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def test_what_processes_said_of_their_end_goes_with_them(tmp_path):
    runtime = Runtime(tmp_path)
    files = [runtime.stopping, runtime.in_flight("model", 1), runtime.vitals("model", 1)]
    gateway = runtime.in_flight(GATEWAY, 2)
    for file in (*files, gateway):
        file.touch()
    runtime.remove_process_files()
    assert [file for file in files if file.exists()] == []
    assert gateway.exists()
