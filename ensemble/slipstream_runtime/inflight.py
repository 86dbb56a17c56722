"""Count the requests in flight in a model's process, readable after the process was killed.

Triton 24.10 never ends a streaming request whose process is gone, so a repair must know whether
there are any. Each process keeps the count in a file of the runtime directory, up to date until its
last instruction.
"""

import threading
from pathlib import Path

from slipstream_runtime.mapped import map_file, map_if_possible

_SIZE = 8


class InFlight:
    """The count of this process. Thread-safe; no call blocks for long."""

    def __init__(self, path: Path, loss: str = "") -> None:
        """Make the file. Without room for it log `loss`; raises OSError if `loss` is empty."""
        self._map = map_if_possible(path, _SIZE, loss) if loss else map_file(path, _SIZE)
        self._word = memoryview(self._map).cast("q")
        self._word[0] = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        """Add `number` requests; a negative number removes some."""
        with self._lock:
            self._word[0] += number


def count(path: Path) -> int:
    """Read the count of a process, alive or not; 0 if it has no file."""
    try:
        return int.from_bytes(path.read_bytes()[:_SIZE], "little", signed=True)
    except OSError:
        return 0
