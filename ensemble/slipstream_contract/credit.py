"""Flow control and cancel through a Triton ensemble: a small file that two stages map.

Between two steps of an ensemble the server keeps a hidden, unbounded queue, and it never tells a
running step that the client is gone. So `tensorrt_llm` sends the next response of a stream only
after `postprocessing` has acknowledged the last one here: that is one credit a stream. A response
that is never acknowledged was dropped by the server because its client has cancelled.

Numbers are unique over all streams, so an acknowledgement that comes late for a stream that is gone
says nothing to the stream that has its slot now. Every word is 8 bytes, aligned, with one writer.
"""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUM_SLOTS = 16384
BEAT_S = 0.02
MAX_BEAT_GAP_S = 0.2  # longer without a beat: the process stood still
_LAYOUT = 0x534C4950_00000002  # changes with the words below
_WORDS_LAYOUT, _WORDS_ALIVE, _WORDS_BEAT, _WORDS_IDLE, _WORDS_HEADER = 0, 1, 2, 3, 16
_WORDS_SLOT = 3  # acknowledged, cancelled, expected
_SIZE = 8 * (_WORDS_HEADER + _WORDS_SLOT * NUM_SLOTS)


class CreditFile:
    """The mapped file. Reading and writing a word is atomic; no call blocks."""

    def __init__(self, path: Path) -> None:
        """Map `path`; the first to come makes it. Raises OSError, ValueError for another layout."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size not in (0, _SIZE):
                raise ValueError(f"{path}: not a credit file of this version")
            # All of it now: touching a page for which a full disk has no room kills the process.
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        # Through a cast view an item is stored by one 8-byte move, unlike struct's byte by byte.
        self._words = memoryview(self._map).cast("q")
        if self._words[_WORDS_LAYOUT] not in (0, _LAYOUT):
            raise ValueError(f"{path}: not a credit file of this version")
        self._words[_WORDS_LAYOUT] = _LAYOUT

    def close(self) -> None:
        """Unmap; no other method may be called afterwards."""
        self._words.release()
        self._map.close()

    # --- postprocessing's side ---

    def acknowledge(self, slot: int, number: int) -> None:
        """Response `number` has been taken. Call it in the order in which requests came in.

        Raises ValueError for a slot out of range; -1 (no flow control) is the caller's to skip.
        """
        self._words[self._index(slot)] = number

    def mark_cancelled(self, slot: int, number: int) -> None:
        """Response `number` came with `is_cancelled()`: its client is gone."""
        self._words[self._index(slot) + 1] = number

    def is_expected(self, slot: int, number: int) -> bool:
        """Whether response `number` is the last one sent in this slot.

        Clients can ask postprocessing too: what they make up must not end another's stream.
        """
        return self._words[self._index(slot) + 2] == number

    # --- tensorrt_llm's side ---

    def expect(self, slot: int, number: int) -> None:
        """Response `number` is about to be sent. It must be hard to guess."""
        self._words[self._index(slot) + 2] = number

    def is_acknowledged(self, slot: int, number: int) -> bool:
        """Whether response `number`, the last sent in this slot, has been taken."""
        return self._words[self._index(slot)] == number

    def is_cancelled(self, slot: int, number: int) -> bool:
        """Whether response `number` met a client that is gone."""
        return self._words[self._index(slot) + 1] == number

    def idle_since_ns(self, now_ns: int) -> int | None:
        """Since when postprocessing has been alive without a break and without work.

        In `time.monotonic_ns()`; None while it is busy, stands still or does not run.
        """
        beat_ns = self._words[_WORDS_BEAT]  # first: it is written last, after a break
        alive_ns, idle_ns = self._words[_WORDS_ALIVE], self._words[_WORDS_IDLE]
        if idle_ns == 0 or now_ns - beat_ns > MAX_BEAT_GAP_S * 1e9:
            return None
        return max(alive_ns, idle_ns)

    @staticmethod
    def _index(slot: int) -> int:
        if not 0 <= slot < NUM_SLOTS:
            raise ValueError(f"slot {slot} of {NUM_SLOTS}")
        return _WORDS_HEADER + _WORDS_SLOT * slot


class Heartbeat:
    """Tells through the credit file that postprocessing is alive, and when it works.

    One thread of a 20 ms period; it beats until `close()`.
    """

    def __init__(self, file: CreditFile) -> None:
        self._words = file._words
        self._closed = threading.Event()
        now = time.monotonic_ns()
        self._words[_WORDS_ALIVE] = self._words[_WORDS_BEAT] = self._words[_WORDS_IDLE] = now
        self._thread = threading.Thread(
            target=self._run, args=(now,), name="heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self, last: int) -> None:
        while not self._closed.wait(BEAT_S):
            now = time.monotonic_ns()
            if now - last > MAX_BEAT_GAP_S * 1e9:
                self._words[_WORDS_ALIVE] = now
            self._words[_WORDS_BEAT] = last = now

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around everything that `execute()` does. Not reentrant: one thread works."""
        self._words[_WORDS_IDLE] = 0
        try:
            yield
        finally:
            self._words[_WORDS_IDLE] = time.monotonic_ns()

    def close(self) -> None:
        """Stop beating; postprocessing then counts as not running."""
        self._closed.set()
        self._thread.join()
        self._words[_WORDS_BEAT] = 0
