"""Draining: the moment of refusal, and whose requests count."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
from slipstream_client import cli
from slipstream_runtime import draining
from slipstream_runtime.directory import GATEWAY, Runtime
from slipstream_runtime.inflight import InFlight


def test_it_refuses_from_its_moment_on_and_not_after_undo(tmp_path):
    runtime = Runtime(tmp_path)
    assert not draining.has_started(runtime)
    assert not draining.refuses(runtime)
    draining.start(runtime, 60)
    assert draining.has_started(runtime)
    assert not draining.refuses(runtime)
    draining.start(runtime, 0)
    assert draining.refuses(runtime)
    draining.undo(runtime)
    assert not draining.has_started(runtime)
    assert not draining.refuses(runtime)


def test_only_requests_of_living_processes_count(tmp_path):
    runtime = Runtime(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    counts = {("ensemble", os.getpid()): 3, (GATEWAY, os.getpid()): 2, ("ensemble", ended.pid): 7}
    for (model, pid), number in counts.items():
        in_flight = InFlight(runtime.in_flight(model, pid))
        in_flight.add(number + 1)
        in_flight.add_probes(1)  # of the server itself, which a drain does not wait for
    assert draining.num_in_flight(runtime) == 5
    runtime.remove_process_files()  # those of tritonserver, which the gateway outlives
    assert draining.num_in_flight(runtime) == 2


def test_a_drain_waits_for_the_last_request_and_no_longer_than_it_may(tmp_path):
    runtime = Runtime(tmp_path)
    in_flight = InFlight(runtime.in_flight("ensemble", os.getpid()))
    in_flight.add(2)
    seen: list[int] = []
    assert draining.drain(runtime, 0.0, 0.1, seen.append) == 2
    end = threading.Timer(0.2, lambda: in_flight.add(-2))
    end.start()
    begin = time.monotonic()
    assert draining.drain(runtime, 0.0, 30.0, seen.append) == 0
    assert time.monotonic() - begin >= 0.2
    assert set(seen) == {0, 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--delay", "5", "--timeout", "4"], "--timeout is 4, less than --delay, 5"),
        (["--runtime", "/nowhere/at/all"], "/nowhere/at/all: no such directory"),
        (["--timeout", "nan"], "'nan' is not a number of seconds from 0 to 86400"),
    ],
)
def test_what_cannot_be_drained_is_named(words, said, capsys):
    with contextlib.suppress(SystemExit):  # argparse's
        assert cli.main(["drain", *words]) == 1
    assert said in capsys.readouterr().err
