"""The memory that ranks share: messages arrive whole and in order, slow ranks or not; waits end."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_runtime.processes import is_stopped, work_of
from slipstream_runtime.ranks import RankError, RankMemory
from slipstream_runtime.stalls import Silence


@given(st.lists(st.integers(0, 600_000), max_size=25), st.integers(2, 4), st.integers(0, 9))
@settings(max_examples=12, deadline=None)
def test_messages_of_every_size_reach_every_rank_in_order(sizes, size, seed):
    descriptor, rng = RankMemory.create(size), random.Random(seed)
    sent = [rng.randbytes(count) for count in sizes]
    found: dict[int, list[bytes]] = {}

    def read(rank: int) -> None:
        memory, pauses = RankMemory(descriptor, size, rank), random.Random(rank + seed)
        found[rank] = []
        for _ in sent:
            time.sleep(pauses.random() / 2000)
            found[rank].append(memory.receive())

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    leader = RankMemory(descriptor, size, 0)
    for message in sent:
        leader.send(message)
    for thread in threads:
        thread.join(20)
    os.close(descriptor)
    assert found == dict.fromkeys(range(1, size), sent)


def test_a_late_rank_is_named_and_a_failure_ends_every_wait():
    descriptor = RankMemory.create(3)
    memory = RankMemory(descriptor, 3, 1)
    memory.limit_s = 0.05
    with pytest.raises(RankError, match=r"rank 0 is late by 0\.05 s"):
        memory.meet()
    memory.limit_s = None
    threading.Timer(0.1, RankMemory(descriptor, 3, 2).fail).start()
    for wait in (memory.receive, memory.meet):
        with pytest.raises(RankError, match="rank 2 has failed"):
            wait()
    os.close(descriptor)


class Signs:
    """What ranks show of themselves."""

    size = 3

    def __init__(self, *started: bool) -> None:
        self.counts, self.are_started = [0, 0, 0], list(started)

    def beats(self) -> list[int]:
        return list(self.counts)

    def started(self) -> list[bool]:
        return list(self.are_started)


def test_silence_is_of_the_rank_that_was_alive(monkeypatch):
    now_s, signs = 10.0, Signs(False, True, True)
    beats = signs.counts
    monkeypatch.setattr("slipstream_runtime.stalls.time.monotonic", lambda: now_s)
    silence = Silence(signs, lambda rank: None)
    for beats[1], beats[2], wanted in ((1, 2, 0.0), (2, 2, 1.0), (3, 2, 2.0)):
        now_s += 1
        assert silence.look()[1] == wanted
    assert silence.look()[0] == 2  # rank 0 is of another host, and starts
    now_s += 500  # the supervisor slept, too
    beats[1] += 1
    assert silence.look() == (2, 4.0)


def test_a_rank_that_starts_is_silent_if_it_does_nothing_at_all(monkeypatch):
    """Imports and drivers hold the interpreter for long, and so no thread gives signs of life."""
    now_s, signs, work = 10.0, Signs(False, False, True), [0, 0, 0]
    monkeypatch.setattr("slipstream_runtime.stalls.time.monotonic", lambda: now_s)
    silence = Silence(signs, work.__getitem__)

    def look(*works: int) -> tuple[int, float]:
        nonlocal now_s
        now_s += 1
        signs.counts[2] += 1
        for rank in works:
            work[rank] += 1
        return silence.look()

    assert look(0)[1] == 0.0
    assert [look(0), look(0)] == [(1, 1.0), (1, 2.0)]  # rank 1 sleeps
    signs.counts[1] += 1
    assert look(0)[1] == 0.0
    assert [look(0), look(0)] == [(1, 1.0), (1, 2.0)]
    assert look(0, 1)[1] == 0.0
    signs.are_started[0] = True  # from here on nothing but signs of life counts
    look(0, 1)
    assert [look(0, 1), look(0, 1)] == [(0, 1.0), (0, 2.0)]


def test_work_is_seen_of_a_process_and_ends_with_it():
    """A process that is stopped has done what it has; one that computes does more."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        first = work_of(process.pid)
        while work_of(process.pid) == first:
            pass
        os.kill(process.pid, signal.SIGSTOP)
        while not is_stopped(process.pid):
            pass
        assert work_of(process.pid) == work_of(process.pid)
    finally:
        process.kill()
        process.wait()
    assert work_of(process.pid) is None
