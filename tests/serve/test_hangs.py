"""Whether a server hangs or is only busy: a verdict on signs, and the signs of real processes."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from slipstream_serve import hangs
from slipstream_serve.hangs import ServerSigns, ThreadWatch, verdict

FINE, LATE = 0.9, 2.0


@pytest.mark.parametrize(
    ("http_s", "streams_s", "resting_s", "said"),
    [
        (FINE, FINE, 0.0, ""),
        (FINE, FINE, 99.0, ""),  # an idle server rests and answers
        (LATE, LATE, 99.0, ""),
        # A thread parses a body, so HTTP is silent; then it rests and still owes the answer.
        (50.0, FINE, 0.3, ""),
        (50.0, FINE, 1.9, ""),
        (50.0, FINE, 2.1, "tritonserver did not answer for 3.5 s"),
        (3.6, FINE, 2.3, "tritonserver did not answer for 3.5 s"),
        (3.6, 3.6, 2.3, "tritonserver did not answer for 3.5 s"),
        (3.4, 3.4, 2.3, ""),
        # A thread works for ever.
        (60.1, FINE, 0.0, "tritonserver did not answer for 60 s"),
        # gRPC streams stand still, with and without work beside them.
        (FINE, 3.6, 2.3, "gRPC streams of tritonserver stood still for 3.5 s"),
        (FINE, 19.9, 0.1, ""),
        (FINE, 20.1, 0.1, "gRPC streams of tritonserver stood still for 20 s"),
        # Nobody answers, but a thread works: a machine with too much to do.
        (15.0, 15.0, 0.1, ""),
        (21.0, 21.0, 0.1, "gRPC streams of tritonserver stood still for 20 s"),
    ],
)
def test_the_verdict_on_signs(http_s: float, streams_s: float, resting_s: float, said: str) -> None:
    assert verdict(ServerSigns(http_s, streams_s, resting_s)) == said


@pytest.mark.parametrize("resting_s", [0.0, 1.0, 3.0, 99.0])
def test_more_silence_never_makes_a_server_well(resting_s: float) -> None:
    steps = [step / 4 for step in range(300)]
    for fixed in (FINE, 10.0, 30.0):
        for signs in (
            [ServerSigns(step, fixed, resting_s) for step in steps],
            [ServerSigns(fixed, step, resting_s) for step in steps],
        ):
            found = [bool(verdict(each)) for each in signs]
            assert found == sorted(found)


CODE = {
    "rest": "import time; print(flush=True); time.sleep(600)",
    "compute": "print(flush=True)\nwhile True: pass",
}


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("kind", "number", "is_resting"), [("rest", 1, True), ("compute", 5, False)]
)
def test_threads_that_work_or_rest(processes, kind: str, number: int, *, is_resting: bool) -> None:
    """Five that compute wait for each other on two cores: to wait for a processor is work."""
    for _ in range(number):
        command = [sys.executable, "-c", CODE[kind]]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline()
    watches = [ThreadWatch() for _ in processes]
    longest_s = [0.0] * number
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        for index, (watch, process) in enumerate(zip(watches, processes, strict=True)):
            longest_s[index] = max(longest_s[index], watch.resting_s(process.pid))
        time.sleep(0.12)
    if is_resting:
        assert min(longest_s) > 0.8
    else:
        assert max(longest_s) < hangs.REST_S / 2
