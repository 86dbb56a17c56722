"""Flow control and cancel through a Triton ensemble: a small file that two stages map.

Between two steps of an ensemble the server keeps a hidden, unbounded queue, and it never tells a
running step that the client is gone. So `tensorrt_llm` sends the next response of a stream only
after `postprocessing` has acknowledged the last one here: that is one credit a stream. A response
that is never acknowledged was dropped by the server because its client has cancelled, or lost by a
process of `postprocessing` that was killed.

`postprocessing` may be several processes. Each acknowledges a response when the server has sent it
on, so that none of them overtakes another with the stream's next one.

Numbers are unique over all streams, so an acknowledgement that comes late for a stream that is gone
says nothing to the stream that has its slot now. Every word is 8 bytes, aligned, with one writer at
a time.
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
MAX_BEAT_GAP_S = 0.2  # longer without a beat: the process stood still
_LAYOUT = 0x534C4950_00000004  # changes with the words below
_WORDS_HEADER = 1  # the layout
_PID, _ALIVE, _BEAT, _IDLE, _WORDS_TAKER = 0, 1, 2, 3, 4
_ACKNOWLEDGED, _CANCELLED, _EXPECTED, _TAKER, _ASKED, _ASKED_NS, _WORDS_SLOT = 0, 1, 2, 3, 4, 5, 6
_WORDS_TAKERS = _WORDS_HEADER + _WORDS_TAKER * MAX_INSTANCES
_SIZE = 8 * (_WORDS_TAKERS + _WORDS_SLOT * NUM_SLOTS)


class CreditFile:
    """The mapped file. Reading and writing a word is atomic; no call blocks."""

    def __init__(self, path: Path) -> None:
        """Map `path`; the first to come makes it. Raises OSError, ValueError for another layout."""
        self.path = path
        if path.exists() and path.stat().st_size not in (0, _SIZE):
            raise ValueError(f"{path}: not a credit file of this version")
        self._map = map_file(path, _SIZE)
        # Through a cast view an item is stored by one 8-byte move, unlike struct's byte by byte.
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
        """Response `number` came with `is_cancelled()`: its client is gone."""
        self.words[_index(slot) + _CANCELLED] = number

    def is_expected(self, slot: int, number: int) -> bool:
        """Whether response `number` is the last one sent in this slot.

        Clients can ask postprocessing too: what they make up must not end another's stream.
        """
        return self.words[_index(slot) + _EXPECTED] == number

    # --- both sides ---

    def last_asked(self, slot: int) -> tuple[int, int]:
        """At which response the server was last asked for the stream's client, and when.

        In `time.monotonic_ns()`.
        """
        first = _index(slot)
        return self.words[first + _ASKED], self.words[first + _ASKED_NS]

    def note_asked(self, slot: int, number: int, now_ns: int) -> None:
        """It is asked now: by who opens the slot, then by who has its response `number`."""
        first = _index(slot)
        self.words[first + _ASKED] = number
        self.words[first + _ASKED_NS] = now_ns

    # --- tensorrt_llm's side ---

    def expect(self, slot: int, number: int) -> None:
        """Response `number` is about to be sent. It must be hard to guess."""
        self.words[_index(slot) + _EXPECTED] = number

    def is_acknowledged(self, slot: int, number: int) -> bool:
        """Whether response `number`, the last sent in this slot, has been taken and sent on."""
        return self.words[_index(slot) + _ACKNOWLEDGED] == number

    def is_cancelled(self, slot: int, number: int) -> bool:
        """Whether response `number` met a client that is gone."""
        return self.words[_index(slot) + _CANCELLED] == number

    def taken_by(self, slot: int) -> int:
        """The taker that has acknowledged the last response in this slot."""
        return self.words[_index(slot) + _TAKER]

    def takers(self) -> list[int]:
        """All that have begun and not ended, of their own accord or killed."""
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
        """Since when a taker has been alive without a break and without work.

        In `time.monotonic_ns()`; None while it is busy, stands still or does not run.
        """
        first = _WORDS_HEADER + taker * _WORDS_TAKER
        is_beating = self._is_beating(taker, now_ns)  # first: it is written last, after a break
        alive_ns, idle_ns = self.words[first + _ALIVE], self.words[first + _IDLE]
        if idle_ns == 0 or not is_beating:
            return None
        return max(alive_ns, idle_ns)


def _index(slot: int) -> int:
    if not 0 <= slot < NUM_SLOTS:
        raise ValueError(f"slot {slot} of {NUM_SLOTS}")
    return _WORDS_TAKERS + _WORDS_SLOT * slot


class Taker:
    """One process of postprocessing: it acknowledges, and tells that it lives and when it works.

    One thread of a 20 ms period; it beats until `close()`.
    """

    def __init__(self, file: CreditFile) -> None:
        """Take the place of one that has ended. Raises ValueError where none has."""
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

    def begin(self) -> None:
        """It has been given requests. `end()` comes before the next ones."""
        self._words[self._first + _IDLE] = 0

    def acknowledge(self, slot: int, number: int) -> None:
        """Response `number` was sent on.

        Raises ValueError for a slot out of range; -1 (no flow control) is the caller's to skip.
        """
        first = _index(slot)
        self._words[first + _TAKER] = self.index
        self._words[first + _ACKNOWLEDGED] = number  # last: it says that the other is true

    def end(self) -> None:
        """All that it was given was sent on."""
        self._words[self._first + _IDLE] = time.monotonic_ns()

    def close(self) -> None:
        """Stop beating, and give the place back."""
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
