"""Run a function periodically in a thread."""

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Periodic:
    """A thread that calls `work` until it is closed; exceptions are logged."""

    def __init__(self, name: str, period_s: float, work: Callable[[], object]) -> None:
        """Start the thread; `period_s` is the pause before each call."""
        self._name = name
        self._period_s = period_s
        self._work = work
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            try:
                self._work()
            except Exception:
                _log.exception("%s failed", self._name)
