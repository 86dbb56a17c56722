"""Flow control and cancellation through a Triton ensemble: a small file that two stages map.

Between two steps of an ensemble Triton has a hidden, unbounded queue, and it never tells a running
step that the client has disconnected. So `tensorrt_llm` sends the next response of a stream only
after `postprocessing` has acknowledged the previous one here: one credit per stream. A response
that is never acknowledged was dropped by Triton because its client cancelled, or was lost with a
killed process of `postprocessing`.

`postprocessing` may be several processes. Each acknowledges a response once Triton has sent it on,
so that no process overtakes another with the stream's next response.

Response numbers are unique over all streams, so a late acknowledgement for an ended stream cannot
be mistaken for one of the stream that has its slot now. Every word is 8 bytes, aligned, with one
writer at a time.
"""

import fcntl
import os
import threading
import time
from pathlib import Path

from slipstream_runtime.mapped import map_file
from slipstream_runtime.processes import MAX_INSTANCES, is_running

NUM_SLOTS = 16384
BEAT_S = 0.02
MAX_BEAT_GAP_S = 0.2  # a longer gap means that the process was stopped
_LAYOUT = 0x534C4950_00000004  # change it with the words below
_WORDS_HEADER = 1  # the layout
_PID, _ALIVE, _BEAT, _IDLE, _WORDS_TAKER = 0, 1, 2, 3, 4
_ACKNOWLEDGED, _CANCELLED, _EXPECTED, _TAKER, _CHECKED, _CHECKED_NS, _WORDS_SLOT = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
)
_WORDS_TAKERS = _WORDS_HEADER + _WORDS_TAKER * MAX_INSTANCES
_SIZE = 8 * (_WORDS_TAKERS + _WORDS_SLOT * NUM_SLOTS)


class CreditFile:
    """The mapped file. A word is read and written atomically; no call blocks."""

    def __init__(self, path: Path) -> None:
        """Map `path`, making it if missing. Raises OSError; ValueError for another layout."""
        self.path = path
        if path.exists() and path.stat().st_size not in (0, _SIZE):
            raise ValueError(f"{path}: not a credit file of this version")
        self._map = map_file(path, _SIZE)
        # A cast view stores an item with one 8-byte move; struct would store single bytes.
        self.words = memoryview(self._map).cast("q")
        if self.words[0] not in (0, _LAYOUT):
            raise ValueError(f"{path}: not a credit file of this version")
        self.words[0] = _LAYOUT

    def close(self) -> None:
        """Unmap; no other method may be called afterwards."""
        self.words.release()
        self._map.close()

    # --- postprocessing's side, see `Taker` too ---

    def mark_cancelled(self, slot: int, number: int) -> None:
        """Mark response `number` as cancelled: its client has disconnected."""
        self.words[_index(slot) + _CANCELLED] = number

    def is_expected(self, slot: int, number: int) -> bool:
        """Return whether response `number` is the last one sent in this slot.

        Clients can send requests to postprocessing too: made-up numbers must end no stream.
        """
        return self.words[_index(slot) + _EXPECTED] == number

    # --- both sides ---

    def last_check(self, slot: int) -> tuple[int, int]:
        """Return the response at which Triton was last queried for a cancel, and the time.

        The time is of `time.monotonic_ns()`.
        """
        first = _index(slot)
        return self.words[first + _CHECKED], self.words[first + _CHECKED_NS]

    def note_check(self, slot: int, number: int, now_ns: int) -> None:
        """Note a query for a cancel now: when the slot is opened, then with response `number`."""
        first = _index(slot)
        self.words[first + _CHECKED] = number
        self.words[first + _CHECKED_NS] = now_ns

    # --- tensorrt_llm's side ---

    def expect(self, slot: int, number: int) -> None:
        """Announce response `number`, which is sent next. The number must be hard to guess."""
        self.words[_index(slot) + _EXPECTED] = number

    def is_acknowledged(self, slot: int, number: int) -> bool:
        """Return whether response `number`, the last sent in this slot, was sent on."""
        return self.words[_index(slot) + _ACKNOWLEDGED] == number

    def is_cancelled(self, slot: int, number: int) -> bool:
        """Return whether the client had disconnected when response `number` arrived."""
        return self.words[_index(slot) + _CANCELLED] == number

    def taken_by(self, slot: int) -> int:
        """Return the taker that acknowledged the last response in this slot."""
        return self.words[_index(slot) + _TAKER]

    def takers(self) -> list[int]:
        """Return the takers that run: started, neither closed nor killed."""
        now_ns, found = time.monotonic_ns(), []
        for index in range(MAX_INSTANCES):
            pid = self.words[_WORDS_HEADER + index * _WORDS_TAKER + _PID]
            if pid and (self._is_beating(index, now_ns) or is_running(pid)):
                found.append(index)
        return found

    def _is_beating(self, taker: int, now_ns: int) -> bool:
        beat_ns = self.words[_WORDS_HEADER + taker * _WORDS_TAKER + _BEAT]
        return now_ns - beat_ns <= MAX_BEAT_GAP_S * 1e9

    def idle_since_ns(self, taker: int, now_ns: int) -> int | None:
        """Return since when a taker has been alive and idle without a break.

        In `time.monotonic_ns()`; None while it is busy, stopped or not running.
        """
        first = _WORDS_HEADER + taker * _WORDS_TAKER
        is_beating = self._is_beating(taker, now_ns)  # read first: after a break it is written last
        alive_ns, idle_ns = self.words[first + _ALIVE], self.words[first + _IDLE]
        if idle_ns == 0 or not is_beating:
            return None
        return max(alive_ns, idle_ns)


def _index(slot: int) -> int:
    if not 0 <= slot < NUM_SLOTS:
        raise ValueError(f"slot {slot} of {NUM_SLOTS}")
    return _WORDS_TAKERS + _WORDS_SLOT * slot


class Taker:
    """A process of postprocessing: acknowledges responses, and reports when it lives and works.

    A thread beats every 20 ms until `close()`.
    """

    def __init__(self, file: CreditFile) -> None:
        """Take the place of a taker that has ended. Raises ValueError if none is free."""
        self._file, self._words = file, file.words
        with file.path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.index = self._free()
            self._first = _WORDS_HEADER + self.index * _WORDS_TAKER
            now = time.monotonic_ns()
            for word in (_ALIVE, _BEAT, _IDLE):
                self._words[self._first + word] = now
            self._words[self._first + _PID] = os.getpid()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(now,), name="heartbeat", daemon=True
        )
        self._thread.start()

    def start(self) -> None:
        """Note that requests have arrived. Call `finish()` before the next `start()`."""
        self._words[self._first + _IDLE] = 0

    def acknowledge(self, slot: int, number: int) -> None:
        """Acknowledge response `number`, which was sent on.

        Raises ValueError for a slot out of range. Slot -1 means no flow control: do not call then.
        """
        first = _index(slot)
        self._words[first + _TAKER] = self.index
        self._words[first + _ACKNOWLEDGED] = number  # written last: it makes the other word valid

    def finish(self) -> None:
        """Note that all responses to the requests were sent on."""
        self._words[self._first + _IDLE] = time.monotonic_ns()

    def close(self) -> None:
        """Stop beating and release the place."""
        self._closed.set()
        self._thread.join()
        self._words[self._first + _BEAT] = 0
        self._words[self._first + _PID] = 0

    def _free(self) -> int:
        taken = self._file.takers()
        for index in range(MAX_INSTANCES):
            pid = self._words[_WORDS_HEADER + index * _WORDS_TAKER + _PID]
            if index not in taken or not is_running(pid):
                return index
        raise ValueError(f"postprocessing has more than {MAX_INSTANCES} processes")

    def _run(self, last: int) -> None:
        while not self._closed.wait(BEAT_S):
            now = time.monotonic_ns()
            if now - last > MAX_BEAT_GAP_S * 1e9:
                self._words[self._first + _ALIVE] = now
            self._words[self._first + _BEAT] = last = now
