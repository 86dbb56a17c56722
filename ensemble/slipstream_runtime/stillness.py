"""Tell whether a model's process hangs, or is busy, or gets no processor time.

A busy process runs, or waits for a processor, and the kernel counts both for each thread. A hanging
process does neither although it should: it has missed a beat, has a request in progress, or leaves
one untouched.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from slipstream_runtime import vitals
from slipstream_runtime.threads import ThreadWatch

STILL_S = 3.0
STOPPED_S = 0.7  # a process stopped (SIGSTOP) for longer counts as hanging
_OVERDUE_S = 1.0  # before a missing beat or reply counts
_MAX_LOOK_S = 0.5  # a longer gap between two looks counts as this: the watcher was delayed
_ACTIVE = 0.1  # share of the elapsed time, from which on the main thread is busy
_TOGETHER = 0.3  # the same for all threads together, without a beat


class Stillness:
    """Watches one process. Call `look` several times a second."""

    def __init__(self, pid: int, path: Path) -> None:
        """Watch the `vitals` file at `path`; without one, the process never counts as hanging."""
        self._pid = pid
        self._path = path
        self._threads = ThreadWatch(_TOGETHER)
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self.what = ""  # why it may hang
        self._still_s = 0.0
        self._looked_s = time.monotonic()
        self._activity_ns = 0
        self._signs: vitals.Signs | None = None
        self._threads.reset()

    @property
    def is_at_work(self) -> bool:
        """Whether it had a request in progress at the last look."""
        return self._signs is not None and self._signs.begun_ns != 0

    def look(self, unanswered_s: float) -> bool:
        """Return whether the process hangs; `what` then says by which sign.

        `unanswered_s` is for how long a probe of the process has been waiting for its reply.
        """
        now_s = time.monotonic()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        signs = vitals.read(self._path)
        what = "" if signs is None else _debt(signs, unanswered_s)
        is_same = what == self.what and signs is not None and signs[1:] == (self._signs or ())[1:]
        self.what, self._signs = what, signs
        if not (what == _NO_BEAT and is_same):
            self._threads.reset()
        if not what:
            self._still_s = 0.0
            return False
        if what == _NO_BEAT:  # the main thread may wait for another that computes
            return self._threads.resting_s(self._pid) > STILL_S
        activity_ns, is_waiting = activity(self._pid)
        active_s, self._activity_ns = (activity_ns - self._activity_ns) / 1e9, activity_ns
        if is_same and not is_waiting and active_s < _ACTIVE * elapsed_s:
            self._still_s += min(elapsed_s, _MAX_LOOK_S)
        else:
            self._still_s = 0.0
        return self._still_s > STILL_S


_NO_BEAT = "did not move"
_NO_END = "stood still at a request"
_NO_START = "did not take a request"


def _debt(signs: vitals.Signs, unanswered_s: float) -> str:
    if time.monotonic_ns() - signs.beat_ns > _OVERDUE_S * 1e9:
        return _NO_BEAT
    if signs.begun_ns:
        return _NO_END
    return _NO_START if unanswered_s > _OVERDUE_S else ""


def activity(pid: int) -> tuple[int, bool]:
    """Return the time (ns) for which its main thread ran or waited to run.

    And whether it runs or waits right now: the kernel counts a wait when it is over.
    """
    thread = Path("/proc") / str(pid) / "task" / str(pid)
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        ran_ns, waited_ns = (thread / "schedstat").read_text().split()[:2]
        state = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return int(ran_ns) + int(waited_ns), state == "R"
    return 0, False
