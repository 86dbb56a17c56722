"""Count the repairs of `slipstream serve`, in a file that the metrics report."""

import contextlib
import os
import struct
from pathlib import Path

KINDS = ("model", "server")
_COUNTS = struct.Struct("<qq")


class Repairs:
    """The counts of one `slipstream serve`, from 0."""

    def __init__(self, path: Path) -> None:
        """Make the file; without room for it no other process sees the counts."""
        self._path = path
        self._counts = dict.fromkeys(KINDS, 0)
        self._write()

    def note(self, kind: str) -> None:
        """Add one repair of a kind in `KINDS`."""
        self._counts[kind] += 1
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # overwriting in place needs no room on a full disk
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, _COUNTS.pack(*self._counts.values()), 0)
            finally:
                os.close(descriptor)


def read(path: Path) -> dict[str, int]:
    """Read the counts by kind; all are 0 if no `slipstream serve` repairs."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    counts = _COUNTS.unpack(data) if len(data) == _COUNTS.size else (0, 0)
    return dict(zip(KINDS, counts, strict=True))
