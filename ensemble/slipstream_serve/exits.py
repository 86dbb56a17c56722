"""Waits for a while, or until one of some processes exits."""

import contextlib
import os
import select
from collections.abc import Iterable


class Exits:
    """Of processes, children or not. Where the kernel has no pidfds, time alone counts."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pidfds: set[int] = set()

    def watch(self, pids: Iterable[int]) -> None:
        """These and no others from now on. Who has exited already is not waited for."""
        self.close()
        for pid in pids:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                self._pidfds.add(pidfd)
                self._poll.register(pidfd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Returns early once for each exit."""
        for pidfd, _ in self._poll.poll(timeout_s * 1e3):
            self._forget(pidfd)

    def close(self) -> None:
        """Watch nobody."""
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _forget(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        self._pidfds.remove(pidfd)
        os.close(pidfd)
