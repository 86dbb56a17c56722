"""Where the time of a start goes."""

import logging
import time


class Laps:
    """Seconds of one thing after another."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
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
