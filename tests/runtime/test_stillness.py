"""Whether a process hangs, or is only busy: real processes of each kind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slipstream_runtime import stillness, vitals
from slipstream_runtime.stillness import Stillness

CODE = """
import ctypes, sys, time
from pathlib import Path
from slipstream_runtime.vitals import Vitals
vitals = Vitals(Path(sys.argv[1]))
print("here", flush=True)
match sys.argv[2]:
    case "idle":
        time.sleep(600)
    case "hang":
        vitals.start()
        time.sleep(600)
    case "freeze":
        ctypes.PyDLL(None).sleep(600)
    case "spin":
        vitals.start()
        while True:
            pass
    case "spin and let nobody else":
        vitals.start()
        sum(range(10**12))
    case "work":
        while True:
            vitals.start()
            time.sleep(0.1)
            vitals.finish()
"""


def begin(processes: list[subprocess.Popen[bytes]], path: Path, kind: str) -> Stillness:
    command = [sys.executable, "-c", CODE, str(path), kind]
    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    assert processes[-1].stdout is not None
    assert processes[-1].stdout.readline() == b"here\n"
    return Stillness(processes[-1].pid, path)


def looks(still: Stillness, seconds: float, unanswered_s: float = 0.0) -> bool:
    """Whether it is seen to hang within that time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if still.look(unanswered_s):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stillness, "STILL_S", 1.0)


@pytest.mark.parametrize(
    ("kind", "what"), [("hang", "stood still at a request"), ("freeze", "did not move")]
)
def test_one_that_hangs(processes, tmp_path: Path, kind: str, what: str) -> None:
    still = begin(processes, tmp_path / "vitals", kind)
    assert looks(still, 60)
    assert still.what == what
    still.reset()
    assert not still.look(0.0)
    assert looks(still, 60)


def test_one_that_takes_no_request(processes, tmp_path: Path) -> None:
    still = begin(processes, tmp_path / "vitals", "idle")
    assert looks(still, 60, unanswered_s=2.0)
    assert still.what == "did not take a request"


def test_one_that_was_stopped(processes, tmp_path: Path) -> None:
    still = begin(processes, tmp_path / "vitals", "idle")
    os.kill(processes[-1].pid, signal.SIGSTOP)
    assert looks(still, 60)
    assert still.what == "did not move"


def test_those_that_are_idle_or_busy(processes, tmp_path: Path) -> None:
    """All at once on two cores, so that they also wait for each other."""
    kinds = ("idle", "spin", "spin", "spin and let nobody else", "spin and let nobody else", "work")
    found = [begin(processes, tmp_path / str(i), kind) for i, kind in enumerate(kinds)]
    until_s = time.monotonic() + 4.0
    while time.monotonic() < until_s:
        for still, kind in zip(found, kinds, strict=True):
            assert not still.look(0.5), (kind, still.what)
        time.sleep(0.1)


def test_signs_that_have_no_room_are_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "vitals"
    signs = vitals.Vitals(path)
    signs.start()
    signs.finish()
    signs.close()
    assert vitals.read(path) is None


def test_one_without_signs(tmp_path: Path) -> None:
    (tmp_path / "half").write_bytes(b"x" * 9)
    for name in ("none", "half"):
        still = Stillness(os.getpid(), tmp_path / name)
        assert not looks(still, 1.5, unanswered_s=9.0)
