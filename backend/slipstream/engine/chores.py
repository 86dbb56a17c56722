"""Work for idle times: a plain iterator, of which an idle turn runs one piece.

A piece runs when no request is there and none was for a while; one that arrives meanwhile waits
for its end. The first error ends the chores, not the engine: no request has anything to do with
them. But on a device that is beyond repair no request would succeed either.
"""

import logging
import time
from collections.abc import Callable, Iterator

from slipstream.engine.bisect import is_of_device

_log = logging.getLogger(__name__)
QUIET_NS = 2_000_000_000  # without a request, before a piece runs
_MS = 1_000_000  # in ns


class Chores:
    """Pieces that are left, and when the next one may run.

    Args:
        pieces: each `next` does one and leaves nothing running; it returns for how many seconds
            there is nothing to do, or None. A generator is closed at the end.
        clock: returns ns.
    """

    def __init__(
        self, pieces: Iterator[float | None], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.fatal: Exception | None = None  # the device is beyond repair
        self._pieces = pieces
        self._clock = clock
        self._is_done = False
        self._starts_ns = clock() + QUIET_NS

    def put_off(self) -> None:
        """Begin the quiet time anew: there is other work."""
        self._starts_ns = self._clock() + QUIET_NS

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long an idle turn may wait for messages, of `idle_ms`."""
        if self._is_done:
            return idle_ms
        return max(0, min(idle_ms, -((self._clock() - self._starts_ns) // _MS)))

    def run(self) -> None:
        """Run a piece, if it is time."""
        if self._is_done or self._clock() < self._starts_ns:
            return
        try:
            pause_s = next(self._pieces, self)
            self._is_done = pause_s is self
            if isinstance(pause_s, float):
                self._starts_ns = self._clock() + round(pause_s * 1e9)
        except Exception as error:
            _log.exception("work for idle times ends: a piece of it failed")
            self._is_done = True
            self.fatal = error if is_of_device(error) else None

    def close(self) -> None:
        """End them: a generator keeps what it has found so far."""
        self._is_done = True
        close = getattr(self._pieces, "close", None)
        if close is None:
            return
        try:
            close()
        except Exception:
            _log.exception("work for idle times could not keep what it found")
