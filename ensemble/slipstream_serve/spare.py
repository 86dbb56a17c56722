"""Room for a repair where the disk is full.

A new process needs two small files in the runtime directory while the one that it replaces has its
own, and what little becomes free meanwhile the server's log takes. So a file holds some room from
the start and gives it up for as long as a repair lasts.
"""

import contextlib
import os
from pathlib import Path

_BYTES = 256 << 10  # a start's log has 30 KB; ten processes have two pages of 4 KB each
_LEAST = 4 << 10


class Spare:
    """The file. Where there is not even room for it, it holds what there is."""

    def __init__(self, path: Path) -> None:
        """It holds the room from now on."""
        self._path = path
        self.hold()

    def hold(self) -> None:
        """Take as much of the room as there is."""
        size = _BYTES
        while size >= _LEAST and not self._allocate(size):
            size //= 2

    def release(self) -> None:
        """Give it up until `hold()`."""
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
