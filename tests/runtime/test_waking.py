"""Waking gently: a process, what it starts, and one that no longer does."""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream_runtime.waking import gentle_children, wake_at_once, wake_gently

NAMES = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}
# Prints the policy of each thread, in the order of their beginning. `begin(policy)` begins one that
# takes that policy; 0 leaves it what it has inherited.
PROCESS = """
import os, threading
from pathlib import Path
from slipstream_runtime.waking import gentle_children, wake_at_once, wake_gently

OTHER, BATCH, IDLE = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE

def take(policy):
    if policy:
        os.sched_setscheduler(0, policy, os.sched_param(0))

def begin(policy=0):
    is_ready = threading.Event()
    def run():
        take(policy)
        is_ready.set()
        threading.Event().wait()
    threading.Thread(target=run, daemon=True).start()
    is_ready.wait()

def tell():
    threads = sorted(int(entry.name) for entry in Path("/proc/self/task").iterdir())
    print(*(os.sched_getscheduler(thread) for thread in threads), flush=True)
"""
TELL = "import os; print(os.sched_getscheduler(0))"


def policies(text: str) -> list[str]:
    return [NAMES[int(word)] for word in text.split()]


def told(*lines: str) -> list[str]:
    """What a new process says that does this."""
    code = "\n".join([PROCESS, *lines, "tell()", "os._exit(0)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return policies(done.stdout)


def own() -> set[int]:
    """The policies of this process's threads, some of which may end meanwhile."""
    found = set()
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.add(os.sched_getscheduler(int(entry.name)))
    return found


def child() -> list[str]:
    """The policy of a process that is started now."""
    command = [sys.executable, "-c", TELL]
    return policies(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def refuse(pid: int, policy: int, param: os.sched_param) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_every_thread_wakes_gently_those_from_before_and_those_to_come() -> None:
    assert told("begin()", "begin()") == ["other"] * 3
    assert told("begin()", "begin()", "wake_gently()", "begin()") == ["batch"] * 4


def test_a_policy_that_somebody_chose_stays() -> None:
    assert told("begin(IDLE)", "begin()", "wake_gently()") == ["batch", "idle", "batch"]
    assert told("take(IDLE)", "begin()", "wake_gently()", "begin()") == ["idle"] * 3
    assert told("begin(IDLE)", "take(BATCH)", "begin()", "wake_at_once()") == [
        *("other", "idle", "other")
    ]
    assert told("take(IDLE)", "begin()", "wake_at_once()") == ["idle"] * 2
    with_children = ("take(IDLE)", "with gentle_children():", "    begin()", "begin()")
    assert told(*with_children) == ["idle"] * 3


def test_it_can_be_undone() -> None:
    lines = ("begin()", "wake_gently()", "begin()", "wake_at_once()", "begin()")
    assert told(*lines) == ["other"] * 4


def test_what_is_started_meanwhile_wakes_gently_its_starter_does_not() -> None:
    before = own()
    with gentle_children():
        assert child() == ["batch"]
    assert own() == before
    assert child() == ["other"]
    lines = ("begin()", "with gentle_children():", "    begin()", "    tell()")
    assert told(*lines) == [*("batch", "other", "batch"), *("other", "other", "batch")]


def test_a_start_that_fails_does_so_as_usual() -> None:
    before = own()
    with pytest.raises(FileNotFoundError, match="absent"), gentle_children():
        subprocess.run(["absent"], check=True)
    assert own() == before


@pytest.mark.parametrize("missing", ["", "sched_getscheduler", "SCHED_BATCH"])
def test_a_refusal_is_logged_once_and_harms_nothing(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "slipstream_runtime.waking")
    before = own()
    if missing:
        monkeypatch.delattr(os, missing)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    wake_gently()
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert (missing or "not permitted") in record.getMessage()
    wake_at_once()
    with gentle_children():
        started = child()
    monkeypatch.undo()
    assert started == ["other"]
    assert own() == before


def test_a_change_that_is_taken_and_not_made_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, policy, param: tried.append(pid))
    wake_gently()
    assert len(tried) == len(set(tried)) > 0


def test_a_thread_that_ends_meanwhile_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end(pid: int, policy: int, param: os.sched_param) -> None:
        raise ProcessLookupError(3, "No such process")

    caplog.set_level(logging.DEBUG, "slipstream_runtime.waking")
    monkeypatch.setattr(os, "sched_setscheduler", end)
    wake_gently()
    assert not caplog.records
