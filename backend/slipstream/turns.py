"""How the supervisor sees that an engine is stuck: the engine counts its turns in a small file.

An idle engine turns about once a second. One that does not is in a step that takes long, or hangs
in the driver, or was stopped.
"""

import mmap
import time
from pathlib import Path
from struct import Struct

_COUNT = Struct("<Q")
_MAX_GAP_S = 2.0


def path_of(address: str) -> Path:
    """The file of the engine that listens at a ZeroMQ address of a path."""
    return Path(address.removeprefix("ipc://") + ".turns")


class Turns:
    """The engine's side."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be made."""
        path.write_bytes(_COUNT.pack(0))  # not sparse: a full disk must not end a write to memory
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNT.size)
        self._number = 0

    def count(self) -> None:
        """One more turn begins."""
        self._number += 1
        _COUNT.pack_into(self._memory, 0, self._number)


class Standstill:
    """The supervisor's side, of one engine.

    Only time that the supervisor itself spent looking counts: when all processes of a machine
    stood still and go on, nobody is stuck.
    """

    def __init__(self, path: Path) -> None:
        """An engine that has not begun to turn may take as long as it likes."""
        self._path = path
        self._path.unlink(missing_ok=True)
        self._last = b""
        self._looked_s = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float:
        """Seconds without a turn. To be called about once a second."""
        now_s = time.monotonic()
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MAX_GAP_S), now_s
        try:
            found = self._path.read_bytes()
        except FileNotFoundError:
            return 0.0
        self._seconds = 0.0 if found != self._last else self._seconds + elapsed_s
        self._last = found
        return self._seconds
