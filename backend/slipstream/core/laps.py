"""Measure how long each part of a start takes."""

import logging
import os
import time
from pathlib import Path


def process_age(pid: int | None = None) -> float:
    """Return the seconds since a process started, this one if none is given.

    0 where there is no such process, or /proc is not available.
    """
    try:
        fields = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class Laps:
    """Durations of consecutive parts, the first of which started `ago` seconds before."""

    def __init__(self, ago: float = 0.0) -> None:
        self._start = self._last = time.perf_counter() - ago
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        """Record the time since the last lap under `name`."""
        now = time.perf_counter()
        self._laps.append((name, now - self._last))
        self._last = now

    def log(self, log: logging.Logger, what: str) -> None:
        """Log one line: `what`, the total in seconds, then each lap."""
        laps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._laps)
        log.info("%s in %.2f s: %s", what, self._last - self._start, laps)
