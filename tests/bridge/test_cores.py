"""Threads of a bridge share a core where there are others, one of those that they may use."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.bridge import cores


@given(st.sets(st.integers(0, 200), min_size=1, max_size=64), st.integers(1, 1 << 22))
def test_which_core(allowed: set[int], pid: int) -> None:
    chosen: list[set[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda who: set(allowed))
        patch.setattr(os, "sched_setaffinity", lambda who, mask: chosen.append(set(mask)))
        patch.setattr(os, "getpid", lambda: pid)
        cores.stay_together()
        cores.stay_together()
    if len(allowed) < 8:
        assert not chosen
    else:
        assert chosen[0] == chosen[1] <= allowed
        assert len(chosen[0]) == 1


def test_only_the_thread_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_MANY_CORES", 1)
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def run() -> None:
        cores.stay_together()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert os.sched_getaffinity(0) == before
    assert len(found[0]) == 1
    assert found[0] <= before
