"""Signs of life of a model's process: three words in a small mapped file, for any watcher.

A process can be alive, not stopped, and still never respond again. A thread beats; the process
notes when it starts a request and counts the requests that it has finished. The file of a killed
process stays until another process of the model starts.
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
    """The contents of the file; times are of `time.monotonic_ns()`."""

    beat_ns: int
    begun_ns: int  # start of the request in progress; 0: none
    num_done: int  # requests


class Vitals:
    """The writing side, for one thread of the process. No call blocks."""

    def __init__(self, path: Path) -> None:
        """Start to beat. If the file cannot be made, a hang is noticed late."""
        self._path = path
        remove_dead(path)
        self._map = map_if_possible(path, _WORDS.size, "a process that hangs will be noticed late")
        self._words = memoryview(self._map).cast("q")
        self._words[0], self._words[1], self._words[2] = time.monotonic_ns(), 0, 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitals", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Note the start of a request."""
        self._words[1] = time.monotonic_ns()

    def finish(self) -> None:
        """Note the end of the request."""
        self._words[1] = 0
        self._words[2] += 1

    def close(self) -> None:
        """Stop beating and remove the file: a process that closes has not died."""
        self._closed.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._words[0] = time.monotonic_ns()


def pid_of(path: Path) -> int:
    """Return the process id in a file's name; 0 if there is none."""
    pid = path.name.rpartition("-")[2]
    return int(pid) if pid.isdigit() else 0


def remove_dead(path: Path) -> None:
    """Remove the files of dead processes of a model; `path` is the file of any of them."""
    model = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{model}-*"):
        if other.name.rpartition("-")[0] == model and not is_running(pid_of(other)):
            with contextlib.suppress(OSError):
                other.unlink()


def read(path: Path) -> Signs | None:
    """Read the signs of a process; None if it has no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return Signs(*_WORDS.unpack(data)) if len(data) == _WORDS.size else None
