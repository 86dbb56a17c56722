"""Count the requests in flight in a model's process, readable after the process was killed.

Triton 24.10 never ends a streaming request whose process is gone, so a repair must know whether
there are any. Each process keeps the count in a file of the runtime directory, up to date until its
last instruction. The server's own probes are among them, and are counted apart, too: a drain waits
for clients alone.
"""

import threading
from pathlib import Path

from slipstream_runtime.mapped import map_file, map_if_possible

_WORD = 8
_SIZE = 2 * _WORD  # all requests, probes


class InFlight:
    """The count of this process. Thread-safe; no call blocks for long."""

    def __init__(self, path: Path, loss: str = "") -> None:
        """Make the file. Without room for it log `loss`; raises OSError if `loss` is empty."""
        self._map = map_if_possible(path, _SIZE, loss) if loss else map_file(path, _SIZE)
        self._words = memoryview(self._map).cast("q")
        self._words[0] = self._words[1] = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        """Add `number` requests; a negative number removes some."""
        with self._lock:
            self._words[0] += number

    def add_probes(self, number: int) -> None:
        """Say that `number` more of the requests are probes; a negative number: no longer."""
        with self._lock:
            self._words[1] += number


def count(path: Path) -> int:
    """Read the count of a process, alive or not; 0 if it has no file."""
    return _read(path)[0]


def count_clients(path: Path) -> int:
    """Read the same without probes."""
    number, num_probes = _read(path)
    return max(0, number - num_probes)  # one that ends leaves the words one after the other


def _read(path: Path) -> tuple[int, int]:
    try:
        data = path.read_bytes()
    except OSError:
        return 0, 0
    first, second = data[:_WORD], data[_WORD:_SIZE]
    return int.from_bytes(first, "little", signed=True), int.from_bytes(second, "little")
