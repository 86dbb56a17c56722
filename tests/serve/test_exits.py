"""A wait that is over when a process exits."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from slipstream_runtime.processes import is_running
from slipstream_serve.exits import Exits

LONG_S = 120.0  # far more than it takes


@pytest.fixture
def exits() -> Iterator[Exits]:
    exits = Exits()
    yield exits
    exits.close()


@contextmanager
def started() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that ends with its stdin; the pid of its child, which does so too."""
    code = "import subprocess as s; c = s.Popen(['cat']); print(c.pid, flush=True); c.wait()"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        yield process, int(process.stdout.readline())


def pidfds() -> int:
    """How many processes this one watches: other threads may open what else they like."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("pidfd" in target for target in targets)


def seconds_of(exits: Exits, timeout_s: float) -> float:
    begin = time.monotonic()
    exits.wait(timeout_s)
    return time.monotonic() - begin


@pytest.mark.parametrize("is_child", [True, False])
def test_it_returns_when_a_process_exits_and_once_only(exits: Exits, is_child: bool) -> None:
    with started() as (process, child), started() as (other, _):
        assert process.stdin
        pid = process.pid if is_child else child
        exits.watch([other.pid, pid])
        assert seconds_of(exits, 0.05) >= 0.05
        process.stdin.close()
        assert seconds_of(exits, LONG_S) < LONG_S
        assert not is_running(pid)  # though nobody has waited for the child
        assert is_running(other.pid)
        assert seconds_of(exits, 0.05) >= 0.05


def test_a_process_that_has_exited_or_never_existed_is_not_waited_for(exits: Exits) -> None:
    with started() as (process, _):
        pass
    exits.watch([process.pid, -1])
    assert seconds_of(exits, 0.05) >= 0.05


def test_a_process_that_is_no_longer_watched_costs_nothing(exits: Exits) -> None:
    before = pidfds()
    with started() as (process, _), started() as (other, _):
        assert process.stdin
        for _ in range(3):
            exits.watch([process.pid, other.pid])
        assert pidfds() == before + 2
        exits.watch([other.pid])
        assert pidfds() == before + 1
        process.stdin.close()
        process.wait()
        assert seconds_of(exits, 0.05) >= 0.05
        exits.close()
    assert pidfds() == before


def test_without_pidfds_time_alone_counts(exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    exits.watch([os.getpid()])
    assert seconds_of(exits, 0.05) >= 0.05
