import signal
import subprocess
import sys
import time

import pytest
from bridge.test_streams import wait_for
from slipstream_contract.credit import NUM_SLOTS, CreditFile, Heartbeat


@pytest.fixture
def pair(tmp_path):
    """Both sides' views of one file."""
    ours, theirs = CreditFile(tmp_path / "credits"), CreditFile(tmp_path / "credits")
    yield ours, theirs
    ours.close()
    theirs.close()


def test_an_acknowledgement_reaches_the_other_side_and_only_its_response(pair):
    ours, theirs = pair
    theirs.acknowledge(7, (5 << 24) + 1)
    assert ours.is_acknowledged(7, (5 << 24) + 1)
    assert not ours.is_acknowledged(7, (5 << 24) + 2)
    assert not ours.is_acknowledged(6, (5 << 24) + 1)
    assert not ours.is_cancelled(7, (5 << 24) + 1)
    theirs.mark_cancelled(7, (5 << 24) + 2)
    assert ours.is_cancelled(7, (5 << 24) + 2)


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 1 << 40])
def test_a_slot_out_of_range_is_refused_and_nothing_written(pair, slot):
    ours, theirs = pair
    with pytest.raises(ValueError, match="slot"):
        theirs.acknowledge(slot, 1)
    assert not any(ours.is_acknowledged(s, 1) for s in (0, NUM_SLOTS - 1))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "credits").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="not a credit file"):
        CreditFile(tmp_path / "credits")


def idle_since(file) -> int:
    """Once it tells: a process that gets no time is taken for one that stands still."""
    found = []
    wait_for(lambda: found.append(file.idle_since_ns(time.monotonic_ns())) or found[-1])
    return found[-1]


def test_idle_only_while_alive_and_out_of_work(pair):
    ours, theirs = pair
    assert ours.idle_since_ns(time.monotonic_ns()) is None  # nobody has ever beaten
    begin = time.monotonic_ns()
    heart = Heartbeat(theirs)
    assert idle_since(ours) >= begin
    with heart.work():
        assert ours.idle_since_ns(time.monotonic_ns()) is None
        done = time.monotonic_ns()
    assert idle_since(ours) >= done
    heart.close()
    assert ours.idle_since_ns(time.monotonic_ns()) is None


_BEAT = """
import pathlib, sys
from slipstream_contract.credit import CreditFile, Heartbeat
heart = Heartbeat(CreditFile(pathlib.Path(sys.argv[1])))
print("beating", flush=True)
sys.stdin.read()
"""


def test_a_stopped_process_is_not_idle_and_starts_anew_when_continued(tmp_path):
    command = [sys.executable, "-c", _BEAT, str(tmp_path / "credits")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"beating\n"
            file = CreditFile(tmp_path / "credits")
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: file.idle_since_ns(time.monotonic_ns()) is None)
            continued = time.monotonic_ns()
            process.send_signal(signal.SIGCONT)
            assert idle_since(file) >= continued
            file.close()
        finally:
            process.kill()
