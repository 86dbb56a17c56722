"""Small files through which the processes of a server share state: each process maps them."""

import logging
import mmap
import os
from pathlib import Path

_log = logging.getLogger(__name__)


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes; the first process makes the file, of zeros. Raises OSError.

    All disk blocks are reserved: touching a page without one on a full disk would kill the
    process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def map_if_possible(path: Path, size: int, loss: str) -> mmap.mmap:
    """Map as `map_file` does; on an OSError log `loss` and return memory of this process alone."""
    try:
        return map_file(path, size)
    except OSError as error:
        _log.warning("%s: %s", error, loss)
        return mmap.mmap(-1, size)
