"""Laps of a start, in one log line that adds up."""

import logging
import re
import subprocess
import sys
import time

import pytest
from slipstream.core.laps import Laps


def test_laps_add_up(caplog: pytest.LogCaptureFixture) -> None:
    laps = Laps(ago=2.0)
    laps.lap("before")
    time.sleep(0.05)
    laps.lap("asleep")
    with caplog.at_level(logging.INFO):
        laps.log(logging.getLogger("test"), "ready")
    found = re.fullmatch(
        r"ready in ([\d.]+) s: before ([\d.]+), asleep ([\d.]+)", caplog.messages[0]
    )
    assert found is not None
    whole, before, asleep = map(float, found.groups())
    assert whole == pytest.approx(before + asleep, abs=0.011)
    assert 2.0 <= before < 3.0
    assert 0.05 <= asleep < 2.0


def test_the_age_of_a_process() -> None:
    program = "import time; time.sleep(0.2)\n"
    program += "from slipstream.core.laps import process_age; print(process_age())"
    began = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0.19 < float(result.stdout) < time.perf_counter() - began + 0.02
