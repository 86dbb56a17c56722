"""A rank that stands still is told from one that works or waits, by real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixtures.tiers import quick_of
from slipstream_runtime import stalls
from slipstream_runtime.processes import (
    Spent,
    descendants_of,
    progress_of,
    spent_by,
    threads_of,
)
from slipstream_runtime.stalls import SERVING_S, Stall, Stalls

# `beat` sleeps shortly for ever, in a thread; each rank says which thread that is, and goes on.
RANK = """
import os, subprocess, sys, threading, time
def nap():
    while True:
        time.sleep(0.02)
def start():
    thread = threading.Thread(target=nap, daemon=True)
    thread.start()
    return thread.native_id
print(start(), flush=True)
"""
HANGS = "os.read(os.pipe()[0], 1)"
NAPS = "nap()"
COMPUTES = "while True: pass"
ALONE = "print(0, flush=True)\n"  # no thread gives signs of life, with which it would take turns
READS_IN_A_THREAD = f"start(); {HANGS}"
COMPUTING = {  # children of a rank that waits for one
    "computes": "while True: pass",
    "its own child computes": "subprocess.run(['sh', '-c', 'while :; do :; done'])",
}
MOVING = {
    "reads": "f = open('/dev/zero', 'rb', 0)\nwhile True: time.sleep(0.001); f.read(1 << 16)",
    "comes to memory": "while True: time.sleep(0.001); mmap.mmap(-1, 1 << 18).write(NUMBERS)",
}
POLLERS = {
    "looks": "while True: time.sleep(0.00005)",
    "reads a file": "while True: time.sleep(0.001); open('/proc/uptime').read()",
    "looks for processes": "while True: time.sleep(0.01); os.listdir('/proc')",
}
IDLE_CHILDREN = {
    "sleeps": ("time.sleep(600)", HANGS),
    "looks from time to time": ("while True: time.sleep(0.05)", HANGS),
    "hangs, and is waited for": (HANGS, "child.wait()"),
    "has ended": ("", HANGS),
    "was stopped": ("os.kill(os.getpid(), 19)", HANGS),
}


class Memory:
    """What ranks show of themselves: here there is one."""

    size = 1

    def __init__(self, beating: int, serves: bool) -> None:
        self._beating, self._serves = beating, serves

    def started(self) -> list[bool]:
        return [self._serves]

    def beating(self, rank: int) -> int:
        return self._beating


@contextmanager
def rank(code: str, start: str = RANK) -> Iterator[tuple[int, int]]:
    """Start a process; return its id and that of the thread that gives signs of life."""
    command = [sys.executable, "-c", start + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            os.killpg(process.pid, 9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [10.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now_s[0])
    return now_s


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.perf_counter() + 60
    while not condition():
        assert time.perf_counter() < deadline


def looks(found: Stalls, clock: list[float], before_each: Callable[[], None]) -> list[Stall | None]:
    """Look twenty times, a second apart."""
    seen = []
    for _ in range(20):
        before_each()
        clock[0] += 1.0
        seen.append(found.look())
    return seen


def stall_of(found: Stalls, clock: list[float], pid: int, beating: int) -> Stall:
    """Look until a rank hangs, which it may not do yet; before each look it gives a sign."""
    deadline = time.perf_counter() + 60
    while True:
        assert time.perf_counter() < deadline
        before = progress_of(pid, [beating])
        wait_for(lambda before=before: progress_of(pid, [beating]) != before)
        clock[0] += 1.0
        if (stall := found.look()) is not None:
            return stall


@pytest.mark.parametrize("code", [HANGS, READS_IN_A_THREAD, "import fcntl, time; time.sleep(600)"])
def test_a_rank_that_serves_and_hangs_in_a_call_is_found_in_time(
    code: str, clock: list[float]
) -> None:
    with rank(code) as (pid, beating):
        found = Stalls(Memory(beating, True), lambda rank: pid, 60)
        assert stall_of(found, clock, pid, beating) == Stall(0, SERVING_S)
        clock[0] += 500  # the supervisor slept, too
        assert stall_of(found, clock, pid, beating).seconds == SERVING_S + 2


@pytest.mark.parametrize("starting_s", [5, 30])
def test_a_rank_that_starts_has_the_time_that_the_operator_gives(
    starting_s: int, clock: list[float]
) -> None:
    with rank(HANGS) as (pid, beating):
        found = Stalls(Memory(beating, False), lambda rank: pid, starting_s)
        assert stall_of(found, clock, pid, beating) == Stall(0, starting_s)


@pytest.mark.parametrize(("code", "serves"), [(NAPS, True), (NAPS, False), (COMPUTES, True)])
def test_a_rank_that_gets_on_is_left_alone(code: str, serves: bool, clock: list[float]) -> None:
    with rank(code) as (pid, beating):
        found = Stalls(Memory(beating, serves), lambda rank: pid, 2)

        def get_on() -> None:
            before = progress_of(pid, [pid])
            wait_for(lambda: progress_of(pid, [pid]) != before)

        assert not any(looks(found, clock, get_on))


@pytest.mark.parametrize("serves", [True, False])
def test_a_rank_that_gets_no_processor_is_left_alone(
    serves: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for a processor makes no progress, and is not killed."""
    monkeypatch.setattr(stalls, "progress_of", lambda pid, threads: "what it had done before")
    with rank(COMPUTES, ALONE) as (pid, beating):
        stat = Path(f"/proc/{pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "R")
        found = Stalls(Memory(beating, serves), lambda rank: pid, 2)
        assert not any(looks(found, clock, lambda: None))


def test_threads_that_read_weights_count_while_a_rank_starts(clock: list[float]) -> None:
    with rank(READS_IN_A_THREAD) as (pid, beating):
        wait_for(lambda: len(threads_of(pid)) == 3)
        [other] = [each for each in threads_of(pid) if each not in (pid, beating)]

        def get_on() -> None:
            before = progress_of(pid, [other])
            wait_for(lambda: progress_of(pid, [other]) != before)

        found = Stalls(Memory(beating, False), lambda rank: pid, 2)
        assert not any(looks(found, clock, get_on))


def child(script: str) -> str:
    """Start a child."""
    code = f"import mmap, os, subprocess, time\nNUMBERS = bytes(1 << 18)\n{script}"
    return f"child = subprocess.Popen([sys.executable, '-c', {code!r}])"


def total(pid: int) -> Spent:
    """What the children of a process have done, all together."""
    return Spent(*map(sum, zip(*spent_by(descendants_of(pid)).values(), strict=True)))


@pytest.mark.parametrize(
    "name", quick_of([*COMPUTING, *MOVING], ("its own child computes", "reads"))
)
def test_a_rank_that_waits_for_a_child_that_gets_on_is_left_alone(
    name: str, clock: list[float]
) -> None:
    with rank(f"{child((COMPUTING | MOVING)[name])}; child.wait()") as (pid, beating):
        wait_for(lambda: descendants_of(pid))
        found = Stalls(Memory(beating, True), lambda rank: pid, 2)

        def get_on() -> None:
            before = total(pid)
            if name in COMPUTING:  # at which looks meet it
                wait_for(lambda: total(pid).computed_s > before.computed_s)
            else:
                wait_for(lambda: total(pid).moved > before.moved + (1 << 20))

        assert not any(looks(found, clock, get_on))


@pytest.mark.parametrize(
    ("enough", "little"),
    [
        (Spent(computed_s=0.2), Spent(computed_s=0.05)),
        (Spent(moved=2_000_000), Spent(moved=500_000)),
        (Spent(stored=1), Spent()),
    ],
    ids=["computes", "moves", "stores"],
)
def test_children_count_that_do_enough(
    enough: Spent, little: Spent, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that computes shortly, and is not met at it, may only look for something."""
    monkeypatch.setattr(stalls, "could_run", lambda pid, threads: False)
    spent = [Spent()]
    monkeypatch.setattr(stalls, "spent_by", lambda pids: dict.fromkeys(pids, spent[0]))
    with rank(f"subprocess.Popen(['sleep', '600']); {HANGS}") as (pid, beating):
        wait_for(lambda: descendants_of(pid))
        found = Stalls(Memory(beating, True), lambda rank: pid, 2)

        def is_found(more: Spent) -> bool:
            spent[0] = Spent(*map(sum, zip(spent[0], more, strict=True)))
            clock[0] += 1.0
            return found.look() is not None

        assert not any(is_found(enough) for _ in range(20))
        wait_for(lambda: is_found(little))
        assert not is_found(enough)


@pytest.mark.parametrize("script", quick_of([*POLLERS.values()], [POLLERS["reads a file"]]))
def test_a_child_that_polls_hides_no_rank_that_hangs(script: str, clock: list[float]) -> None:
    with rank(f"{child(script)}; {HANGS}") as (pid, beating):
        wait_for(lambda: descendants_of(pid))
        found = Stalls(Memory(beating, True), lambda rank: pid, 9)

        def is_found() -> bool:
            before = total(pid)
            wait_for(lambda: total(pid) != before)
            clock[0] += 1.0
            return found.look() is not None

        wait_for(is_found)


def test_programs_that_a_child_starts_now_and_then_hide_no_rank_that_hangs(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has another number, and comes to some memory."""
    monkeypatch.setattr(stalls, "could_run", lambda pid, threads: False)
    numbers = iter(range(1000))
    new = Spent(0.01, 400_000)
    monkeypatch.setattr(stalls, "spent_by", lambda pids: {next(numbers): new})
    with rank(f"subprocess.Popen(['sleep', '600']); {HANGS}") as (pid, beating):
        found = Stalls(Memory(beating, True), lambda rank: pid, 9)
        assert stall_of(found, clock, pid, beating) == Stall(0, SERVING_S)


@pytest.mark.parametrize("name", IDLE_CHILDREN)
@pytest.mark.parametrize("serves", quick_of([True, False], [True]), ids=["serves", "starts"])
def test_a_child_that_does_nothing_hides_no_rank_that_hangs(
    name: str, serves: bool, clock: list[float]
) -> None:
    script, waits = IDLE_CHILDREN[name]
    with rank(f"{child(script)}; {waits}") as (pid, beating):
        wait_for(lambda: descendants_of(pid))
        found = Stalls(Memory(beating, serves), lambda rank: pid, 9)
        assert stall_of(found, clock, pid, beating) == Stall(0, SERVING_S if serves else 9)


def test_ranks_of_other_hosts_and_those_that_have_ended_are_not_looked_at(
    clock: list[float],
) -> None:
    with rank(HANGS) as (pid, beating):
        pass
    for each in (0, pid):
        found = Stalls(Memory(beating, True), lambda rank, each=each: each, 2)
        assert not any(looks(found, clock, lambda: None))
