"""Where the time of a start goes."""

import logging
import os
import time
from pathlib import Path


def process_age() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after the system did
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class Laps:
    """Seconds of one thing after another, of which the first began `ago` seconds before."""

    def __init__(self, ago: float = 0.0) -> None:
        self._begin = self._last = time.perf_counter() - ago
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        """What was done since the last lap was `name`."""
        now = time.perf_counter()
        self._laps.append((name, now - self._last))
        self._last = now

    def log(self, log: logging.Logger, what: str) -> None:
        """One line: the whole, then the laps."""
        laps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._laps)
        log.info("%s in %.2f s: %s", what, self._last - self._begin, laps)
