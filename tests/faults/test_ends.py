"""A wait that ends early when a process does."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from slipstream_compose.ends import Ends
from slipstream_contract.processes import is_running

LONG_S = 120.0  # far more than it takes


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@contextmanager
def started() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that ends with its stdin; the pid of its child, which does so too."""
    code = "import subprocess as s; c = s.Popen(['cat']); print(c.pid, flush=True); c.wait()"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        yield process, int(process.stdout.readline())


def seconds_of(ends: Ends, timeout_s: float) -> float:
    begin = time.monotonic()
    ends.wait(timeout_s)
    return time.monotonic() - begin


@pytest.mark.parametrize("is_child", [True, False])
def test_it_returns_when_a_process_ends_and_once_only(ends: Ends, is_child: bool) -> None:
    with started() as (process, child), started() as (other, _):
        assert process.stdin
        pid = process.pid if is_child else child
        ends.watch([other.pid, pid])
        assert seconds_of(ends, 0.05) >= 0.05
        process.stdin.close()
        assert seconds_of(ends, LONG_S) < LONG_S
        assert not is_running(pid)  # though nobody has waited for the child
        assert is_running(other.pid)
        assert seconds_of(ends, 0.05) >= 0.05


def test_who_has_ended_or_never_was_is_not_waited_for(ends: Ends) -> None:
    with started() as (process, _):
        pass
    ends.watch([process.pid, -1])
    assert seconds_of(ends, 0.05) >= 0.05


def test_who_is_watched_no_more_costs_nothing(ends: Ends) -> None:
    before = os.listdir("/proc/self/fd")
    with started() as (process, _), started() as (other, _):
        assert process.stdin
        during = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            ends.watch([process.pid, other.pid])
        assert len(os.listdir("/proc/self/fd")) == during + 2
        ends.watch([other.pid])
        process.stdin.close()
        process.wait()
        assert seconds_of(ends, 0.05) >= 0.05
        ends.close()
    assert os.listdir("/proc/self/fd") == before


def test_without_pidfds_time_alone_counts(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    ends.watch([os.getpid()])
    assert seconds_of(ends, 0.05) >= 0.05
