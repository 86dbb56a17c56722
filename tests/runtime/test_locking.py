"""Test that a lock of a server lets in a single process at a time."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from slipstream_runtime.locking import locked

HOLD = """
import sys, time
from pathlib import Path
from slipstream_runtime.locking import locked
with locked(Path(sys.argv[1])):
    print("inside", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(path: Path, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLD, str(path), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    return process


def test_another_process_waits_for_its_end(tmp_path):
    with hold(tmp_path / "lock", 1.0):
        begin = time.monotonic()
        with locked(tmp_path / "lock"):
            assert time.monotonic() - begin > 0.5


def test_one_that_is_killed_holds_nothing(tmp_path):
    with hold(tmp_path / "lock", 600) as process:
        process.kill()
        with locked(tmp_path / "lock"):
            pass
    with locked(None):
        pass


def test_one_that_waits_says_for_which_process(tmp_path, caplog):
    with hold(tmp_path / "lock", 600) as process:
        timer = threading.Timer(1.2, process.kill)
        timer.start()
        with locked(tmp_path / "lock", report_s=0.5):
            pass
        timer.join()
    lines = [record.message for record in caplog.records]
    assert len(lines) >= 2
    assert all(f"pid {process.pid} has" in line for line in lines)
    assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_holder_that_hangs_is_waited_for_no_longer_than_the_bound(tmp_path):
    with hold(tmp_path / "lock", 600) as process:
        begin = time.monotonic()
        try:
            with (
                pytest.raises(TimeoutError, match=f"for lock, which pid {process.pid} still has"),
                locked(tmp_path / "lock", most_s=0.5),
            ):
                pass
            assert time.monotonic() - begin >= 0.5
        finally:
            process.kill()
    with locked(tmp_path / "lock", most_s=0.5):  # it is free again
        pass


@pytest.mark.rest
def test_each_holder_has_the_time_of_its_own(tmp_path):
    """Wait for two that together take longer than the bound for one."""
    path = tmp_path / "lock"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"1")
        file.flush()

        def hand_over() -> None:
            time.sleep(4)
            file.seek(0)
            file.write(b"2")
            file.flush()
            time.sleep(4)
            fcntl.flock(file, fcntl.LOCK_UN)

        thread = threading.Thread(target=hand_over)
        thread.start()
        with locked(path, most_s=7):
            pass
        thread.join()
