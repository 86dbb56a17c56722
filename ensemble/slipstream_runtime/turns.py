"""Let the supervisor see that an engine is stuck: the engine counts loop turns in a small file.

An idle engine turns about once a second. One that does not turn is in a long step, hangs in the
driver, or was stopped.
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
    """Return the file of the engine that listens at a ZeroMQ ipc:// address."""
    return Path(address.removeprefix("ipc://") + ".turns")


def _reset(path: Path) -> None:
    """Set the count to zero in place, which a full disk allows; making a new file it may not.

    Never sparse: writing to mapped memory without a disk block would kill the process.
    """
    with path.open("r+b" if path.exists() else "xb") as file:
        file.write(_COUNT.pack(0))


class Turns:
    """The engine's side: counts turns."""

    def __init__(self, path: Path) -> None:
        """Map the file. If it cannot be made, the engine serves, but is not watched."""
        self._number = 0
        try:
            _reset(path)
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError as error:
            _log.warning("%s: an engine that is stuck will not be noticed", error)
            self._memory = mmap.mmap(-1, _COUNT.size)

    def count(self) -> None:
        """Count the start of a turn."""
        self._number += 1
        _COUNT.pack_into(self._memory, 0, self._number)


class Standstill:
    """The supervisor's side: times how long one engine has not turned.

    Only time during which the supervisor itself looked counts: if the whole machine was suspended,
    no engine is stuck.
    """

    def __init__(self, path: Path) -> None:
        """Watch from the first turn on: starting may take any time."""
        self._path = path
        with contextlib.suppress(OSError):
            _reset(path)
        self._last = b""
        self._looked_s = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float:
        """Return the seconds without a turn. Call it about once a second."""
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
