"""A test that hangs is ended, and named."""

from pathlib import Path

import pytest
from slipstream_runtime.processes import is_running

TESTS_FOLDER = Path(__file__).parents[1]
STUCK = """
import subprocess
from pathlib import Path
import pytest
from fixtures import hangs

hangs.SPARE_S = 0.5
pytestmark = pytest.mark.timeout(0.5)

def wait_twice():
    with subprocess.Popen(["sleep", "600"]) as process:
        Path("pid").write_text(str(process.pid))
        process.wait()

@pytest.fixture
def stuck_end():
    yield
    wait_twice()

"""
LATE = """
import time
import pytest
from fixtures import hangs

hangs.SPARE_S = 0.1

@pytest.mark.timeout(0.1)
def test_late(): time.sleep(600)

def test_after_it(): time.sleep(0.3)  # no timer is left
"""


@pytest.mark.parametrize(
    ("test", "num_failed"),
    [("def test_stuck(): wait_twice()", 1), ("def test_stuck(stuck_end): assert False", 2)],
)
def test_a_test_that_goes_on_after_its_timeout_ends_its_worker(
    test: str, num_failed: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has started ends, too; another worker ends the file that it has begun."""
    pytester.makepyfile(test_a=STUCK + test, test_b=LATE)
    monkeypatch.setenv("PYTHONPATH", str(TESTS_FOLDER))
    plugins = ("-p", "fixtures.hangs", "-p", "no:cacheprovider")
    workers = ("-n2", "--dist", "loadfile", "--max-worker-restart=0")
    result = pytester.runpytest_subprocess(*plugins, *workers)
    result.assert_outcomes(passed=1, failed=num_failed + 1)
    result.stdout.fnmatch_lines(["worker 'gw*' crashed while running 'test_a.py::test_stuck'"])
    result.stderr.fnmatch_lines(["test_a.py::test_stuck goes on *", "* in wait_twice"])
    assert not is_running(int((pytester.path / "pid").read_text()))
