"""Small files by which the processes of a server tell each other something: each maps them."""

import logging
import mmap
import os
from pathlib import Path

_log = logging.getLogger(__name__)


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map so many bytes; the first to come makes the file, of zeros. Raises OSError.

    It has all its room from the beginning: touching a page for which a full disk has none would
    end the process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def map_if_possible(path: Path, size: int, loss: str) -> mmap.mmap:
    """Likewise; where that cannot be, memory of this process alone, and `loss` is told."""
    try:
        return map_file(path, size)
    except OSError as error:
        _log.warning("%s: %s", error, loss)
        return mmap.mmap(-1, size)
