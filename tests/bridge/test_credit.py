import signal
import subprocess
import sys
import time

import pytest
from fixtures.waiting import wait_for
from slipstream_runtime.credit import NUM_SLOTS, CreditFile, Taker
from slipstream_runtime.processes import MAX_INSTANCES


@pytest.fixture
def pair(tmp_path):
    """A view of a credit file, and a taker that acknowledges through another view."""
    ours, theirs = CreditFile(tmp_path / "credits"), CreditFile(tmp_path / "credits")
    taker = Taker(theirs)
    yield ours, taker
    taker.close()
    ours.close()
    theirs.close()


def test_an_acknowledgement_reaches_the_other_side_and_only_its_response(pair):
    ours, taker = pair
    taker.acknowledge(7, (5 << 24) + 1)
    assert ours.is_acknowledged(7, (5 << 24) + 1)
    assert not ours.is_acknowledged(7, (5 << 24) + 2)
    assert not ours.is_acknowledged(6, (5 << 24) + 1)
    assert not ours.is_cancelled(7, (5 << 24) + 1)
    ours.mark_cancelled(7, (5 << 24) + 2)
    assert ours.is_cancelled(7, (5 << 24) + 2)


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 1 << 40])
def test_a_slot_out_of_range_is_refused_and_nothing_written(pair, slot):
    ours, taker = pair
    with pytest.raises(ValueError, match="slot"):
        taker.acknowledge(slot, 1)
    assert not any(ours.is_acknowledged(s, 1) for s in (0, NUM_SLOTS - 1))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "credits").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="not a credit file"):
        CreditFile(tmp_path / "credits")


def idle_since(file, taker=0) -> int:
    """Wait for it: a process that gets no CPU time is taken for a suspended one."""
    found = []
    wait_for(lambda: found.append(file.idle_since_ns(taker, time.monotonic_ns())) or found[-1])
    return found[-1]


def test_idle_only_while_alive_and_out_of_work(tmp_path):
    ours, theirs = CreditFile(tmp_path / "credits"), CreditFile(tmp_path / "credits")
    assert ours.idle_since_ns(0, time.monotonic_ns()) is None  # nobody has ever beaten
    assert ours.takers() == []
    begin = time.monotonic_ns()
    taker = Taker(theirs)
    assert idle_since(ours) >= begin
    taker.start()
    assert ours.idle_since_ns(0, time.monotonic_ns()) is None
    done = time.monotonic_ns()
    taker.finish()
    assert idle_since(ours) >= done
    taker.close()
    assert ours.idle_since_ns(0, time.monotonic_ns()) is None
    assert ours.takers() == []


def test_each_process_has_a_place_of_its_own_until_it_ends(pair):
    ours, first = pair
    others = [Taker(ours) for _ in range(MAX_INSTANCES - 1)]
    assert [first.index, *(taker.index for taker in others)] == list(range(MAX_INSTANCES))
    with pytest.raises(ValueError, match=f"more than {MAX_INSTANCES} processes"):
        Taker(ours)
    others[3].start()
    assert ours.idle_since_ns(others[3].index, time.monotonic_ns()) is None
    assert idle_since(ours, others[4].index)
    others[4].acknowledge(9, 77)
    assert ours.taken_by(9) == others[4].index
    others[3].close()
    assert ours.takers() == [0, 1, 2, 3, 5, 6, 7]
    others[3] = Taker(ours)
    assert others[3].index == 4
    for taker in others:
        taker.close()
    assert ours.takers() == [first.index]


_BEAT = """
import pathlib, sys
from slipstream_runtime.credit import CreditFile, Taker
taker = Taker(CreditFile(pathlib.Path(sys.argv[1])))
print("beating", flush=True)
sys.stdin.read()
"""


def test_a_stopped_process_is_not_idle_and_one_that_was_killed_is_there_no_more(tmp_path):
    command = [sys.executable, "-c", _BEAT, str(tmp_path / "credits")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"beating\n"
            file = CreditFile(tmp_path / "credits")
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: file.idle_since_ns(0, time.monotonic_ns()) is None)
            assert file.takers() == [0]
            continued = time.monotonic_ns()
            process.send_signal(signal.SIGCONT)
            assert idle_since(file) >= continued
        finally:
            process.kill()
        wait_for(lambda: file.takers() == [])
        assert file.idle_since_ns(0, time.monotonic_ns()) is None
        taker = Taker(file)
        assert taker.index == 0
        taker.close()
        file.close()
