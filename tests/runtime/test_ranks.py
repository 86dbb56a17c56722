"""The memory that ranks share: messages arrive whole and in order, slow ranks or not; waits end."""

import os
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_runtime.ranks import RankError, RankMemory, Silence, close_quietly


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
    close_quietly(descriptor)
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


def test_silence_is_of_the_rank_that_was_alive(monkeypatch):
    beats, now_s = [0, 0, 0], 10.0
    monkeypatch.setattr("slipstream_runtime.ranks.time.monotonic", lambda: now_s)
    silence = Silence(lambda: list(beats))
    for beats[1], beats[2], wanted in ((0, 1, 0.0), (1, 2, 0.0), (2, 2, 1.0), (3, 2, 2.0)):
        now_s += 1
        assert silence.look()[1] == wanted
    assert silence.look()[0] == 2  # rank 0 has not started yet
    now_s += 500  # the supervisor slept, too
    beats[1] += 1
    assert silence.look() == (2, 4.0)
