"""Claim parts of a file on disk, so that of several processes one makes each.

A claim is a lock on one byte of a file beside it, at a place that the part's name gives. The kernel
releases it when the process ends, however it ends. Such locks are of an open file, not of a process
(`F_OFD_SETLK`): two claimants within a process exclude each other, too.
"""

import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream_runtime.once import warn_once

_log = logging.getLogger(__name__)
_LOCK = struct.Struct("@hhqqi4x")  # flock: type, whence, start, length, pid
_NUM_PLACES = 1 << 62
_WRITES = "writes"  # of the whole file
_TAKEN = (errno.EAGAIN, errno.EACCES)
_POLL_S = 0.002


class Claims:
    """Claims on parts of the file at `path`. Where files cannot be locked, nothing is shared out.

    Without a path, too, all parts are ours.
    Two parts meet in one place once in 2^62: one of them is then made later.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(path.with_suffix(".lock"), mode, 0o600)
        except OSError as error:
            warn_once(_log, f"{path}: what other processes do is not known: {error}")

    def take(self, part: str) -> bool:
        """Claim a part, unless another claimant has it; return whether it is ours now."""
        return self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, part)

    def release(self, part: str) -> None:
        """Give up a part."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, part)

    @contextmanager
    def writing(self, patience_s: float) -> Iterator[None]:
        """Read the file and write it anew in this block, while nobody else does.

        Raises TimeoutError if another has been writing for `patience_s`: it may be stopped.
        """
        deadline_s = time.monotonic() + patience_s
        while not self.take(_WRITES):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{self._path}: another process writes it, for {patience_s:g} s")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self.release(_WRITES)

    def close(self) -> None:
        """Give up all parts."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, command: int, kind: int, part: str) -> bool:
        if self._file is None:
            return True
        digest = hashlib.sha256(part.encode()).digest()
        place = int.from_bytes(digest[:8], "little") % _NUM_PLACES
        try:
            fcntl.fcntl(self._file, command, _LOCK.pack(kind, os.SEEK_SET, place, 1, 0))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            warn_once(_log, f"{self._path}: parts of it cannot be locked: {error}")
            self.close()
        return True
