"""How the supervisor sees that an engine is stuck: the engine counts its turns in a small file.

An idle engine turns about once a second. One that does not is in a step that takes long, or hangs
in the driver, or was stopped.
"""

import contextlib
import logging
import mmap
import time
from pathlib import Path
from struct import Struct

_log = logging.getLogger(__name__)

_COUNT = Struct("<Q")
_MAX_GAP_S = 2.0


def path_of(address: str) -> Path:
    """The file of the engine that listens at a ZeroMQ address of a path."""
    return Path(address.removeprefix("ipc://") + ".turns")


def _reset(path: Path) -> None:
    """To zero, where it lies: on a full disk that is possible, and a new file is not.

    Never sparse: a write to memory for which there is no block would end the process.
    """
    with path.open("r+b" if path.exists() else "xb") as file:
        file.write(_COUNT.pack(0))


class Turns:
    """The engine's side."""

    def __init__(self, path: Path) -> None:
        """Where the file cannot be made, the engine serves and nobody sees whether it is stuck."""
        self._number = 0
        try:
            _reset(path)
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError as error:
            _log.warning("%s: an engine that is stuck will not be noticed", error)
            self._memory = mmap.mmap(-1, _COUNT.size)

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
        with contextlib.suppress(OSError):
            _reset(path)
        self._last = b""
        self._looked_s = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float:
        """Seconds without a turn. To be called about once a second."""
        now_s = time.monotonic()
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MAX_GAP_S), now_s
        try:
            found = self._path.read_bytes()
        except OSError:
            return 0.0
        is_standing = found == self._last and found != _COUNT.pack(0)
        self._seconds = self._seconds + elapsed_s if is_standing else 0.0
        self._last = found
        return self._seconds
