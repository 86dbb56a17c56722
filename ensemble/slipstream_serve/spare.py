"""Reserve disk space for a repair on a full disk.

A new process needs two small files in the runtime directory while the process that it replaces
still has its own, and the server's log takes whatever becomes free. So a file reserves space from
the start, and releases it for the time of a repair.
"""

import contextlib
import os
from pathlib import Path

_BYTES = 256 << 10  # the log of a start takes 30 KB, ten processes two pages of 4 KB each
_LEAST = 4 << 10


class Spare:
    """The reserving file. If there is less space than wanted, it reserves what there is."""

    def __init__(self, path: Path) -> None:
        """Reserve the space."""
        self._path = path
        self.reserve()

    def reserve(self) -> None:
        """Reserve as much of the space as there is."""
        size = _BYTES
        while size >= _LEAST and not self._allocate(size):
            size //= 2

    def release(self) -> None:
        """Release the space until `reserve()`."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _allocate(self, size: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.ftruncate(descriptor, 0)
            return False
        finally:
            os.close(descriptor)
        return True
