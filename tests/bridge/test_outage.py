"""What clients are told of an engine that ends at each start, by a supervisor and its starters."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slipstream import launch, wire
from slipstream.bridge.bridge import Bridge
from slipstream.config import EngineConfig
from slipstream.launch import CANNOT_START, Supervisor, SupervisorStarter
from slipstream_contract.errors import ContractError
from slipstream_runtime import failed_starts
from slipstream_runtime.directory import Runtime

RESTARTED = "the engine is not running; it is being restarted"
CONFIG = EngineConfig(checkpoint="none")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """The files of an engine whose supervisor makes no pauses."""
    for name in ("_FIRST_PAUSE_S", "_MAX_PAUSE_S"):
        monkeypatch.setattr(launch, name, 0.0)
    runtime = Runtime(tmp_path)
    runtime.log.touch()
    return runtime


def supervise(runtime: Runtime, engines: Iterator[int | None], *, is_old: bool = True) -> int:
    """Run a supervisor with a function in the place of each engine; the code that it ends with."""
    supervisor = Supervisor(runtime, -1, os.getpid())
    supervisor._was_ready = is_old  # of an engine that has served before, it never gives up

    def run() -> int | None:
        code = next(engines)
        if code == -11:  # it crashed as soon as it was ready
            supervisor._ready_s = time.monotonic()
        if code == 0:  # served for as long as it takes
            supervisor._ready_s = -launch._STEADY_S
            supervisor._look_if_ready()
        return code

    supervisor._run_engine = run
    return supervisor.run()


def say(runtime: Runtime, words: str) -> None:
    with runtime.log.open("a") as log:
        log.write(f"more\n{launch._REASON}{words}\nDone.\n")


def test_starts_that_fail_are_counted_until_an_engine_has_served(runtime):
    outage = SupervisorStarter(runtime, CONFIG, os.getpid()).outage
    end = f"; it is started again after a pause; its log is {runtime.log}"

    def engines() -> Iterator[int | None]:
        assert outage() == RESTARTED
        say(runtime, "no GPU is left")
        yield 1
        said = "its last start failed with exit code 1: no GPU is left"
        assert outage() == f"the engine is not running: {said}{end}"
        say(runtime, "out of memory")
        yield CANNOT_START
        yield -9
        said = "its last 3 starts failed, the last one with signal 9: it said nothing"
        assert outage() == f"the engine is not running: {said}{end}"
        yield 0
        assert outage() == RESTARTED
        yield None

    assert supervise(runtime, engines()) == 0


def test_an_engine_that_crashes_once_is_restarted_and_one_that_always_does_has_failed(runtime):
    outage = SupervisorStarter(runtime, CONFIG, os.getpid()).outage

    def engines() -> Iterator[int | None]:
        for _ in range(2):
            yield -11
            assert outage() == RESTARTED
            yield 0
            assert outage() == RESTARTED
        yield -11
        yield -11
        yield -11
        assert "its last 2 starts failed, the last one with signal 11" in outage()
        yield None

    assert supervise(runtime, engines()) == 0


def test_a_supervisor_that_gave_up_and_its_successor_count_on(runtime):
    starter = SupervisorStarter(runtime, CONFIG, os.getpid())
    for count in (1, 2):
        say(runtime, "no such checkpoint")
        assert supervise(runtime, iter([CANNOT_START]), is_old=False) == 1
        assert failed_starts.read(runtime.failed_starts).count == count
    assert "its last 2 starts failed, the last one with exit code 2" in starter.outage()
    assert starter.failure() is not None  # what refuses a start is said as before


def test_what_an_earlier_server_counted_is_not_said(runtime):
    failed_starts.note(runtime.failed_starts, 1, "of long ago")
    starter = SupervisorStarter(runtime, CONFIG, os.getpid())
    assert starter.outage() == RESTARTED
    failed_starts.note(runtime.failed_starts, 1, "of now")
    assert "of now" in starter.outage()


@pytest.mark.parametrize("content", [b"", b"[1", b"[1, 2]", b'["x", 1, "a"]', b"null"])
def test_a_damaged_count_is_none(tmp_path: Path, content: bytes):
    file = tmp_path / "failed"
    file.write_bytes(content)
    assert failed_starts.read(file) is None


def test_requests_and_health_say_so(runtime, monkeypatch):
    monkeypatch.setattr(SupervisorStarter, "ensure", lambda self: None)
    bridge = Bridge("model", runtime, CONFIG, os.getpid())
    asks: list[Callable[[], object]] = [
        lambda: bridge.connection.send(wire.Cancel(1)),
        lambda: bridge.connection.request_status(1.0),
    ]
    try:
        for count, is_failing in ((1, False), (2, True)):
            for ask in asks:
                with pytest.raises(ContractError) as caught:
                    ask()
                assert (caught.value.message == RESTARTED) != is_failing
                assert ("no GPU is left" in caught.value.message) == is_failing
            failed_starts.note(runtime.failed_starts, count, "no GPU is left")
    finally:
        bridge.close()
