"""Let one process of a server at a time run a block."""

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Run the block while this process has the lock of a file, made if missing; None: at once.

    The end of the process releases it, too. Raises OSError if the file cannot be made.
    """
    if path is None:
        yield
        return
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for %s", path.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
