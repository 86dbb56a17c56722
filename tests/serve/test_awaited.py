"""A server that waits for the end of a process of its own, seen from outside."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from fixtures.waiting import wait_for
from slipstream_serve import awaited
from slipstream_serve.awaited import AwaitedEnds

CODE = """
import subprocess, sys, threading, time
child = subprocess.Popen(["sleep", "600"])
threading.Thread(target=child.wait, daemon=True).start()
print(child.pid, flush=True)
sys.stdin.readline()
child.kill()
sys.stdin.readline()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of which one thread waits for a child, and that child."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CODE], **pipes) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def test_an_end_that_does_not_come_is_named(server, monkeypatch) -> None:
    process, child = server
    monkeypatch.setattr(awaited, "LOOK_S", 0.0)
    monkeypatch.setattr(awaited, "AWAITED_S", 0.3)
    watch, began = AwaitedEnds(), time.monotonic()
    wait_for(lambda: watch.look(process.pid, lambda: {child: "echo_0_0"}))
    assert time.monotonic() - began > 0.3
    said = watch.look(process.pid, lambda: {child: "echo_0_0"})
    assert said == f"tritonserver waits for the end of echo_0_0 (pid {child}), which does not end"
    # Others' children, and one that has ended, are awaited by right.
    assert watch.look(process.pid, lambda: {child + 1: "echo_0_1"}) == ""
    process.stdin.write("\n")
    process.stdin.flush()
    wait_for(lambda: not watch.look(process.pid, lambda: {child: "echo_0_0"}))


def test_a_server_that_waits_for_nobody_or_is_gone_does_not_hang() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        watch = AwaitedEnds()
        assert watch.look(process.pid, lambda: {process.pid: "echo_0_0"}) == ""
        process.kill()
    assert AwaitedEnds().look(process.pid, dict) == ""
