"""Parts of the GPU suite: which files, in which order, and how many at a time."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "benchmarks" / "gpu_suite.sh"
SECONDS = ROOT / "benchmarks" / "gpu_suite_seconds.txt"
ALONE = ["tests/runner/test_gpu_memory.py", "tests/faults/test_engine_process.py"]
# In the place of Python: notes the file that it is to test, and how many are tested at the time.
NOTING = """#!/bin/bash
if [ "$1" = - ]; then exec cat > /dev/null; fi
mkdir -p "$NOTES/running"
mktemp "$NOTES/running/$$.XXXXXX" > /dev/null
echo "$(ls "$NOTES/running" | wc -l) ${!#}" >> "$NOTES/started"
sleep 0.05
rm "$NOTES/running/$$".*
echo "1 passed"
[ "${!#}" != "$FAILING" ]
"""


def suite(**variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run([SUITE], env=own | variables, capture_output=True, text=True, check=False)


def listed(part: str) -> list[str]:
    return suite(LIST="1", PART=part).stdout.split()


def took() -> dict[str, int]:
    rows = [row.split() for row in SECONDS.read_text().splitlines() if not row.startswith("#")]
    return {name: int(seconds) for seconds, name in rows}


def test_parts_have_each_file_once_and_are_of_one_length() -> None:
    whole, parts = listed("1/1"), [listed("1/2"), listed("2/2")]
    assert sorted(whole) == sorted(itertools.chain(*parts))
    assert {*took()} <= {*whole}
    assert len(whole) == len({*whole}) > 40
    sums = [sum(took().get(name, 100) * (20 if name in ALONE else 1) for name in x) for x in parts]
    assert abs(sums[0] - sums[1]) < 0.05 * sum(sums)
    for part in parts:
        others = [took().get(name, 100) for name in part if name not in ALONE]
        assert others == sorted(others, reverse=True)


@pytest.mark.parametrize("jobs", [1, 3])
def test_some_run_alone_and_the_others_a_few_at_a_time(jobs: int, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(NOTING)
    python.chmod(0o755)
    by_length = [*ALONE[::-1], "tests/kernels/test_gpu_w4.py", "tests/kernels/test_gpu_decode.py"]
    by_length += ["tests/kernels/test_gpu_eight_bits.py", "tests/kernels/test_gpu_stage.py"]
    given = {"FILES": " ".join(by_length[::-1]), "JOBS": str(jobs), "PYTHON": str(python)}
    given |= {"NOTES": str(tmp_path), "FAILING": "tests/kernels/test_gpu_w4.py"}
    done = suite(**given, NO_BENCHMARK="1")
    assert done.returncode == 1
    started = [row.split() for row in (tmp_path / "started").read_text().splitlines()]
    assert started[:2] == [["1", name] for name in ALONE]
    names = [name for _, name in started]
    assert names[2:] == by_length[2:] if jobs == 1 else sorted(names) == sorted(by_length)
    assert max(int(count) for count, _ in started) <= jobs
    assert done.stdout.count("1 passed") == len(by_length)
    assert re.search(r"^== tests-kernels-test_gpu_stage.py, \d+ s$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "1/2/3", "a/b"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    done = suite(PART=part, LIST="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"PART={part} is no I/N" in done.stderr
