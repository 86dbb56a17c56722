"""Faults of other processes that model `slipstream_health` reports: real ones, dead or stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slipstream.bridge.health import Siblings
from slipstream_runtime.directory import Runtime

CODE = """
import sys, time
from pathlib import Path
import os
from slipstream_runtime.directory import Runtime
from slipstream_runtime.vitals import Vitals
vitals = Vitals(Runtime(Path(sys.argv[1])).vitals(sys.argv[2], os.getpid()))
print("ready", flush=True)
for line in sys.stdin:
    if line == "hang\\n":
        vitals.start()
vitals.close()
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes = []

    def start(model: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CODE, str(tmp_path), model]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, text=True, **pipes))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def siblings(tmp_path: Path) -> Iterator[Siblings]:
    siblings = Siblings(Runtime(tmp_path))
    yield siblings
    siblings.close()


def wait_for(siblings: Siblings, faults: list[str], timeout_s: float = 120.0) -> None:
    begin = time.monotonic()
    while siblings.look() != faults:
        assert time.monotonic() - begin < timeout_s, (siblings.look(), faults)
        time.sleep(0.05)


def test_a_dead_process_is_reported_until_another_takes_its_place(
    begin, siblings: Siblings
) -> None:
    first, second = begin("postprocessing"), begin("postprocessing")
    time.sleep(0.6)
    assert siblings.look() == []
    first.kill()
    first.wait()
    assert siblings.look() == [f"the process of model postprocessing (pid {first.pid}) ended"]
    begin("postprocessing_of_another")  # whose name begins alike
    time.sleep(0.6)
    assert siblings.look()
    begin("postprocessing")
    assert siblings.look() == []
    second.stdin.close()  # it ends by itself, as an unloaded model does
    second.wait()
    time.sleep(0.6)
    assert siblings.look() == []


@pytest.mark.rest
def test_one_that_is_stopped_or_hangs(begin, siblings: Siblings) -> None:
    process = begin("vllm_model")
    os.kill(process.pid, signal.SIGSTOP)
    try:
        wait_for(siblings, [f"the process of model vllm_model (pid {process.pid}) was stopped"])
    finally:
        os.kill(process.pid, signal.SIGCONT)
    wait_for(siblings, [])
    process.stdin.write("hang\n")
    process.stdin.flush()
    what = "stood still at a request for 3 s"
    wait_for(siblings, [f"the process of model vllm_model (pid {process.pid}) {what}"])


def test_the_dead_of_an_earlier_server_count_for_nothing(begin, tmp_path: Path) -> None:
    process = begin("preprocessing")
    process.kill()
    process.wait()
    assert len(list(tmp_path.glob("vitals-*"))) == 1
    siblings = Siblings(Runtime(tmp_path))
    time.sleep(0.6)
    assert siblings.look() == []
    siblings.close()
