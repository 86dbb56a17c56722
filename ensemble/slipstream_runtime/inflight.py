"""How many requests a model's process has in its hands, readable after that process was killed.

Triton 24.10 never ends a streaming request whose process is gone. Whoever repairs the server must
know whether there are any: a word in a file of the runtime directory tells, which a process keeps
up to date until its last instruction and which nobody need answer for.
"""

import threading
from pathlib import Path

from slipstream_runtime.mapped import map_file

_SIZE = 8


class InFlight:
    """The count of this process. Thread-safe; no call blocks for long."""

    def __init__(self, path: Path) -> None:
        """Make the file. Raises OSError where there is no room for it."""
        self._map = map_file(path, _SIZE)
        self._word = memoryview(self._map).cast("q")
        self._word[0] = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        """`number` requests more, or fewer where it is negative."""
        with self._lock:
            self._word[0] += number


def count(path: Path) -> int:
    """What the file of a process says, alive or not; 0 where it has none."""
    try:
        return int.from_bytes(path.read_bytes()[:_SIZE], "little", signed=True)
    except OSError:
        return 0
