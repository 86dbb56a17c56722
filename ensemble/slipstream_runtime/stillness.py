"""Tells a model's process that hangs from one that is busy, or gets no processor.

A busy process runs, or waits for a processor, which the kernel counts for each thread. One that
hangs owes something and does neither: it does not beat, works at one request for ever, or leaves
one lying that it was given.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from slipstream_runtime import vitals

STILL_S = 3.0
STOPPED_S = 0.7  # a process that was stopped (SIGSTOP) for so long is not waited for
_OVERDUE_S = 1.0  # a beat, or an answer
_MAX_LOOK_S = 0.5  # between two looks counts no more: the watcher itself was held up
_ACTIVE = 0.1  # of the time that passes


class Stillness:
    """Of one process. Look several times a second."""

    def __init__(self, pid: int, path: Path) -> None:
        """`path` is that of its `vitals`; without one, nothing is ever said."""
        self._pid = pid
        self._path = path
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.what = ""  # what it owes
        self._still_s = 0.0
        self._looked_s = time.monotonic()
        self._activity_ns = 0
        self._signs: vitals.Signs | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether it was at a request when it was last looked at."""
        return self._signs is not None and self._signs.begun_ns != 0

    def look(self, unanswered_s: float) -> bool:
        """Whether it hangs; `unanswered_s` is how long a question has been waiting for its answer.

        `what` then says how one sees that.
        """
        now_s = time.monotonic()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        signs = vitals.read(self._path)
        what = "" if signs is None else _debt(signs, unanswered_s)
        is_same = what == self.what and signs is not None and signs[1:] == (self._signs or ())[1:]
        self.what, self._signs = what, signs
        if not what:
            self._still_s = 0.0
            return False
        activity_ns, is_waiting = activity(self._pid, of_all=what == _NO_BEAT)
        active_s, self._activity_ns = (activity_ns - self._activity_ns) / 1e9, activity_ns
        if is_same and not is_waiting and active_s < _ACTIVE * elapsed_s:
            self._still_s += min(elapsed_s, _MAX_LOOK_S)
        else:
            self._still_s = 0.0
        return self._still_s > STILL_S


_NO_BEAT = "did not move"
_NO_END = "stood still at a request"
_NO_BEGIN = "did not take a request"


def _debt(signs: vitals.Signs, unanswered_s: float) -> str:
    if time.monotonic_ns() - signs.beat_ns > _OVERDUE_S * 1e9:
        return _NO_BEAT
    if signs.begun_ns:
        return _NO_END
    return _NO_BEGIN if unanswered_s > _OVERDUE_S else ""


def activity(pid: int, of_all: bool) -> tuple[int, bool]:
    """Time (ns) that its main thread, or all of them, has run or waited for a processor.

    And whether one runs or waits at this moment: a wait counts only when it is over.
    """
    folder = Path("/proc") / str(pid) / "task"
    threads = folder.iterdir() if of_all else [folder / str(pid)]
    total, is_waiting = 0, False
    with contextlib.suppress(OSError):
        for thread in threads:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                ran_ns, waited_ns = (thread / "schedstat").read_text().split()[:2]
                total += int(ran_ns) + int(waited_ns)
                state = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                is_waiting |= state == "R"
    return total, is_waiting
