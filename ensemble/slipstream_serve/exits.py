"""Wait for a while, or until one of several processes exits."""

import contextlib
import os
import select
from collections.abc import Iterable


class Exits:
    """Waits for processes, children or not. Without pidfds in the kernel, time alone counts."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pidfds: set[int] = set()

    def watch(self, pids: Iterable[int]) -> None:
        """Watch these processes and no others. Processes that have already exited are left out."""
        self.close()
        for pid in pids:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                self._pidfds.add(pidfd)
                self._poll.register(pidfd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for `timeout_s` seconds; return early once for each exit."""
        for pidfd, _ in self._poll.poll(timeout_s * 1e3):
            self._unwatch(pidfd)

    def close(self) -> None:
        """Stop watching all processes."""
        for pidfd in list(self._pidfds):
            self._unwatch(pidfd)

    def _unwatch(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        self._pidfds.remove(pidfd)
        os.close(pidfd)
