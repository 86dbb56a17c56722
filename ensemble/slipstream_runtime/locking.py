"""Let one process of a server at a time run a block."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)
_TRY_S = 0.2
_REPORT_S = 30.0  # between two lines of one that waits
_MOST_S = 1800.0  # for one holder; large checkpoints come over slow networks


@contextlib.contextmanager
def locked(
    path: Path | None, report_s: float = _REPORT_S, most_s: float = _MOST_S
) -> Iterator[None]:
    """Run the block while this process has the lock of a file, made if missing; None: at once.

    The file holds the process id of the last holder. One that waits logs it again and again: a
    holder that hangs looks like one that is slow, but it can be named. The end of the
    holder releases the lock, too. Raises OSError if the file cannot be made; TimeoutError if the
    same process holds the lock for more than `most_s` while this one waits.
    """
    if path is None:
        yield
        return
    with path.open("a+b") as file:
        _wait(file, path.name, report_s, most_s)
        file.truncate(0)
        file.write(b"%d" % os.getpid())
        file.flush()
        yield


def _wait(file: BinaryIO, name: str, report_s: float, most_s: float) -> None:
    """Take the lock of an open file. Raises TimeoutError."""
    holder = ""
    since_s = reported_s = 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now_s = time.monotonic()
            found = _read_holder(file)
            if found != holder:  # the time of another one counts anew
                holder, since_s, reported_s = found, now_s, now_s - report_s
            if now_s - reported_s >= report_s:
                reported_s = now_s
                _log.warning(
                    "waiting for %s, which pid %s has: %.0f s", name, holder, now_s - since_s
                )
            if now_s - since_s > most_s:
                message = (
                    f"waited {most_s:g} s for {name}, which pid {holder} still has: "
                    "if that process hangs, end it, and load this model again"
                )
                raise TimeoutError(message) from None
            time.sleep(_TRY_S)
        else:
            return


def _read_holder(file: BinaryIO) -> str:
    """Return the process id in the file of a lock."""
    file.seek(0)
    return file.read(16).decode("ascii", "replace") or "?"
