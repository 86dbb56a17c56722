"""When stubs of a benchmark handed tokens to the server: rows of (seed, ns, tokens).

Times are since the epoch. The file is linked beside the `model.py` of a stub, and imports nothing
but the standard library.
"""

import os
import threading
from array import array
from collections import deque
from itertools import chain
from pathlib import Path

VARIABLE = "PACED_HANDOVERS"  # a directory
_NOTES_A_WRITE = 1024


class HandoverJournal:
    """Appends to its process's file of the directory that the environment names.

    Rows of one seed come from one thread at a time, in order.
    """

    def __init__(self, model: str) -> None:
        path = Path(os.environ[VARIABLE], f"{model}-{os.getpid()}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._notes: deque[tuple[str, int, int]] = deque()
        self._writing = threading.Lock()

    def add(self, request_id: str, time_ns: int, num_tokens: int) -> None:
        """Tokens of the stream whose request id is its seed; others are nobody's."""
        self._notes.append((request_id, time_ns, num_tokens))
        if len(self._notes) >= _NOTES_A_WRITE:
            self._write()

    def close(self) -> None:
        """Write what is left."""
        self._write()
        os.close(self._file)

    def _write(self) -> None:
        with self._writing:
            notes = [self._notes.popleft() for _ in range(len(self._notes))]
            rows = ((int(name), ns, count) for name, ns, count in notes if name.isdigit())
            os.write(self._file, array("q", chain.from_iterable(rows)))
