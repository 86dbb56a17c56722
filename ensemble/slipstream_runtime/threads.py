"""Measure from outside for how long all threads of a process have rested."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

_MIN_LOOK_S = 0.1  # shortest time between two looks that is measured
_MAX_LOOK_S = 0.5  # a longer gap counts as this: the watcher was delayed
_WORKS, _WAITS = 0.8, 0.1  # shares of the time between two looks


class _Thread(NamedTuple):
    ran_ns: int
    used_ns: int  # ran, or waited for a processor; a wait counts when it is over
    is_waiting: bool  # runs, or waits for a processor or a disk, at this moment


class ThreadWatch:
    """Measures for how long all threads of one process have rested. Look several times a second.

    A thread works if it ran, or waited for a processor or a disk, for most of the time between two
    looks. A thread that only wakes up often, as it does to wait for an interpreter's lock, rests,
    however long a loaded machine lets it wait for a processor each time.
    """

    def __init__(self, together: float | None = None) -> None:
        """`together`: all threads work if they run for this share of the time in sum; or None."""
        self._together = together
        self.reset()

    def reset(self) -> None:
        """Start over: the process counts as working until now."""
        self._threads: dict[str, _Thread] = {}
        self._looked_s = time.monotonic()
        self._rested_s = 0.0

    def resting_s(self, pid: int) -> float:
        """Return the seconds since a thread of the process `pid` was last seen to work."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._looked_s
        if self._threads and elapsed_s < _MIN_LOOK_S:
            return self._rested_s
        before, self._threads, self._looked_s = self._threads, _threads(pid), now_s
        if before:
            has_worked = self._have_worked(before, elapsed_s * 1e9)
            self._rested_s = 0.0 if has_worked else self._rested_s + min(elapsed_s, _MAX_LOOK_S)
        return self._rested_s

    def _have_worked(self, before: dict[str, _Thread], elapsed_ns: float) -> bool:
        pairs = [(before[name], now) for name, now in self._threads.items() if name in before]
        if any(_has_worked(old, new, elapsed_ns) for old, new in pairs):
            return True
        ran_ns = sum(new.ran_ns - old.ran_ns for old, new in pairs)
        return self._together is not None and ran_ns > self._together * elapsed_ns


def _has_worked(before: _Thread, now: _Thread, elapsed_ns: float) -> bool:
    used_ns = now.used_ns - before.used_ns
    has_waited = before.is_waiting and now.is_waiting and used_ns < _WAITS * elapsed_ns
    return used_ns > _WORKS * elapsed_ns or has_waited


def _threads(pid: int) -> dict[str, _Thread]:
    found = {}
    with contextlib.suppress(OSError):
        for folder in (Path("/proc") / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                ran_ns, waited_ns = (folder / "schedstat").read_text().split()[:2]
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                used_ns = int(ran_ns) + int(waited_ns)
                found[folder.name] = _Thread(int(ran_ns), used_ns, state in "RD")
    return found
