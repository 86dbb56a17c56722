"""Signs of life of a model's process, for whoever watches it: three words of a small mapped file.

A process can be alive, not stopped, and yet never answer again. One thread beats; the requests that
the process is given are counted when they are done, and one that is being worked at has its begin.
The file of a process that was killed stays, until another takes its place.
"""

import contextlib
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from slipstream_runtime.mapped import map_if_possible
from slipstream_runtime.processes import is_running

BEAT_S = 0.25
_WORDS = struct.Struct("<qqq")


class Signs(NamedTuple):
    """What the file says; times are of `time.monotonic_ns()`."""

    beat_ns: int
    begun_ns: int  # of the request that is being worked at; 0: none
    num_done: int  # requests


class Vitals:
    """The process's side; one thread works. No call blocks."""

    def __init__(self, path: Path) -> None:
        """Begin to beat. Where the file cannot be made, nobody will see whether we hang."""
        self._path = path
        forget_dead(path)
        self._map = map_if_possible(path, _WORDS.size, "a process that hangs will be noticed late")
        self._words = memoryview(self._map).cast("q")
        self._words[0], self._words[1], self._words[2] = time.monotonic_ns(), 0, 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A request is about to be worked at."""
        self._words[1] = time.monotonic_ns()

    def end(self) -> None:
        """It is done."""
        self._words[1] = 0
        self._words[2] += 1

    def close(self) -> None:
        """Beat no more, and leave no file: who ends so has not died."""
        self._closed.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._words[0] = time.monotonic_ns()


def pid_of(path: Path) -> int:
    """The process whose file it is; 0 where its name does not say so."""
    pid = path.name.rpartition("-")[2]
    return int(pid) if pid.isdigit() else 0


def forget_dead(path: Path) -> None:
    """Remove the files of a model's processes that have died; `path` is that of any of them."""
    model = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{model}-*"):
        if other.name.rpartition("-")[0] == model and not is_running(pid_of(other)):
            with contextlib.suppress(OSError):
                other.unlink()


def read(path: Path) -> Signs | None:
    """The signs of a process; None where it has no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return Signs(*_WORDS.unpack(data)) if len(data) == _WORDS.size else None
