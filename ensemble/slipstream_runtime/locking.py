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


@contextlib.contextmanager
def locked(path: Path | None, report_s: float = _REPORT_S) -> Iterator[None]:
    """Run the block while this process has the lock of a file, made if missing; None: at once.

    The file holds the process id of the last holder. One that waits logs it again and again: a
    holder that hangs looks like one that is slow, but it can be named. The end of the
    holder releases the lock, too. Raises OSError if the file cannot be made.
    """
    if path is None:
        yield
        return
    with path.open("a+b") as file:
        _wait(file, path.name, report_s)
        file.truncate(0)
        file.write(b"%d" % os.getpid())
        file.flush()
        yield


def _wait(file: BinaryIO, name: str, report_s: float) -> None:
    """Take the lock of an open file."""
    began_s = time.monotonic()
    reported_s = -report_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - began_s
            if waited_s - reported_s >= report_s:
                reported_s = waited_s
                file.seek(0)
                holder = file.read(16).decode("ascii", "replace") or "?"
                _log.warning("waiting for %s, which pid %s has: %.0f s", name, holder, waited_s)
            time.sleep(_TRY_S)
        else:
            return
