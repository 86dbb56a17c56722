"""When stubs of a benchmark handed tokens to the server: rows of (seed, ns, tokens).

Times are since the epoch. The file is linked beside the `model.py` of a stub, and imports nothing
but the standard library.
"""

import os
from array import array
from pathlib import Path

VARIABLE = "PACED_HANDOVERS"  # a directory
_ROWS_A_WRITE = 64


class HandoverJournal:
    """Appends to its process's file of the directory that the environment names.

    Rows of one seed come from one thread at a time. A write takes 5 us, once for so many rows.
    """

    def __init__(self, model: str) -> None:
        path = Path(os.environ[VARIABLE], f"{model}-{os.getpid()}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rows: dict[str, array[int]] = {}

    def add(self, request_id: str, time_ns: int, num_tokens: int, is_last: bool = False) -> None:
        """Tokens of the stream whose request id is its seed; others are nobody's.

        After the last nothing of the stream is kept here.
        """
        rows = self._rows.get(request_id)
        if rows is None:
            if not request_id.isdigit():
                return
            rows = self._rows[request_id] = array("q")
        rows.extend((int(request_id), time_ns, num_tokens))
        if is_last:
            os.write(self._file, self._rows.pop(request_id))
        elif len(rows) >= 3 * _ROWS_A_WRITE:
            os.write(self._file, rows)
            del rows[:]

    def close(self) -> None:
        """Write what is left."""
        for rows in self._rows.values():
            os.write(self._file, rows)
        os.close(self._file)
