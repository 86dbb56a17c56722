"""The threads of real processes, seen from outside: whether they work or rest."""

import subprocess
import sys
import time

import pytest
from slipstream_runtime.threads import ThreadWatch

CODE = {
    "rest": "import time; print(flush=True); time.sleep(600)",
    "wake often": "import time; print(flush=True)\nwhile True: time.sleep(0.005)",
    "compute": "print(flush=True)\nwhile True: pass",
    "compute in turns": """
import threading
def compute():
    while True: pass
for _ in range(2): threading.Thread(target=compute).start()
print(flush=True)
import time; time.sleep(600)
""",
}


@pytest.mark.parametrize(
    ("kind", "number", "is_resting"),
    [
        ("rest", 1, True),
        ("wake often", 5, True),
        pytest.param("compute", 5, False, marks=pytest.mark.rest),
        ("compute in turns", 1, False),
    ],
)
def test_threads_that_work_or_rest(processes, kind: str, number: int, *, is_resting: bool) -> None:
    """Five that compute wait for each other on two cores: to wait for a processor is work."""
    for _ in range(number):
        command = [sys.executable, "-c", CODE[kind]]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline()
    watches = [ThreadWatch(0.3) for _ in processes]
    longest_s = [0.0] * number
    # On a loaded machine one that rests may seem to work for a look or two, and starts over.
    until_s = time.monotonic() + (30.0 if is_resting else 1.0)
    while time.monotonic() < until_s and not (is_resting and min(longest_s) > 0.8):
        for index, (watch, process) in enumerate(zip(watches, processes, strict=True)):
            longest_s[index] = max(longest_s[index], watch.resting_s(process.pid))
        time.sleep(0.12)
    if is_resting:
        assert min(longest_s) > 0.8
    else:
        assert max(longest_s) < 1.0
