"""Memory that the ranks of one engine share: messages of rank 0, meetings, signs of life.

A rank is a process that holds a part of the weights. All map one anonymous file, whose descriptor
they inherit: no name can collide, and nothing is left behind. Words have 32 bits, each on a cache
line of its own, and one writer. A reader spins for some 20 us, then it sleeps on the word (futex).

    words      by rank: signs of life, messages read, meetings of all and of its stage come to,
               states handed to the next stage, whether its start is over, the thread that gives
               signs of life; messages sent, failure
    facts      by rank: what it says of itself at start
    messages   a ring of slots, from rank 0 to all others
    exchange   by rank two buffers that take turns, for sums and gathers

Ranks on several hosts each map the memory of their own; see `span.py`.

Stores become visible in order on x86-64; elsewhere the system call before each word orders them.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterable, Sequence

from slipstream_runtime.span import NO_SPAN, Span

MAX_RANKS = 8
EXCHANGE_BYTES = 1 << 20  # of one buffer
BEAT_S = 0.25  # between two signs of life
_LINE = 64
_BEAT, _READ, _CAME, _MET, _HANDED, _STARTED, _BEATING = range(7)  # words of a rank
_WORDS_OF_RANK = 7
_FACT_BYTES = 4096
_SLOTS, _SLOT_BYTES = 8, 256 << 10
_HEAD_BYTES = 8  # of a slot: bytes of this piece, and whether more of the message follow
_SPINS = 100
_NAP_S = 0.1  # asleep at most this long between two looks whether a rank has failed
_WAIT, _WAKE = 0, 1
_FUTEX = {"x86_64": 202, "aarch64": 98}
_IS_ORDERED = platform.machine() == "x86_64"
_MASK = (1 << 32) - 1


class RankError(RuntimeError):
    """Ranks that cannot go on together: one is late, has failed, or differs from the others."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_syscall = ctypes.CDLL(None, use_errno=True).syscall


def _is_reached(value: int, wanted: int) -> bool:
    """Return whether a counter of 32 bits has come to `wanted`, or further."""
    return (value - wanted) & _MASK < 1 << 31


class RankMemory:
    """The memory of `size` ranks, as one of them, or their supervisor, sees it.

    Args:
        descriptor: what `create` returned.
        size: number of ranks.
        rank: its own; None: the supervisor's.
    """

    def __init__(self, descriptor: int, size: int, rank: int | None = None) -> None:
        assert 1 <= size <= MAX_RANKS
        self.size, self.rank = size, rank
        self.limit_s: float | None = None  # of a wait for other ranks; None: none
        self._memory = mmap.mmap(descriptor, num_bytes(size))
        self._words = memoryview(self._memory).cast("B")[: _facts_at(size)].cast("I")
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._address = base
        self._number = _FUTEX.get(platform.machine())
        self._span = Span.of(os.environ) if rank is not None else NO_SPAN
        self._written: list[tuple[int, int]] = []  # for other hosts: begin, bytes
        self._num_sent = 0
        self._num_read = 0
        self._num_meetings = {_CAME: 0, _MET: 0}

    @staticmethod
    def create(size: int) -> int:
        """Make the memory, zeros; return its descriptor, which is not inherited unless passed."""
        descriptor = os.memfd_create("slipstream-ranks")
        os.truncate(descriptor, num_bytes(size))
        return descriptor

    @classmethod
    def alive(cls, descriptor: int, size: int, rank: int) -> "RankMemory":
        """Return the memory as a rank sees it, which gives signs of life from here on."""
        memory = cls(descriptor, size, rank)
        memory.beat_forever()
        return memory

    # --- words ---------------------------------------------------------------------------------

    def _store(self, index: int, value: int) -> None:
        """Write a word behind all that was written before, and wake what sleeps on it."""
        if not _IS_ORDERED:
            self._wake(index)
        self._words[index] = value & _MASK
        self._wake(index)
        if self._span.links:
            written, self._written = self._written, []
            parts = [(begin, self._memory[begin : begin + size]) for begin, size in written]
            try:
                self._span.send(parts, index, value & _MASK)
            except OSError as error:
                raise RankError(str(error)) from error

    def wrote(self, turn: int, size: int) -> None:
        """Note that so many bytes of this rank's exchange buffer are for the next meeting."""
        if self._span.links:
            assert self.rank is not None
            self._written.append((_buffer_at(self.size, self.rank, turn), size))

    def _put(self, begin: int, data: bytes) -> None:
        """Write bytes that other hosts get before the next word."""
        self._memory[begin : begin + len(data)] = data
        if self._span.links:
            self._written.append((begin, len(data)))

    def apply(self, parts: Iterable[tuple[int, bytes]], index: int, value: int) -> None:
        """Write what a rank of another host has written, and then its word."""
        for begin, data in parts:
            self._memory[begin : begin + len(data)] = data
        self._store(index, value)

    def address(self, rank: int) -> str:
        """Return the address of a rank's host, as other ranks reach it."""
        return self._span.address(rank)

    def name(self, rank: int) -> str:
        """Return a rank, and its host if there are several."""
        return self._span.name(rank)

    def _wake(self, index: int) -> None:
        if self._number is not None:
            where = ctypes.c_void_p(self._address + 4 * index)
            _syscall(self._number, where, _WAKE, ctypes.c_int(1 << 30), None, None, 0)

    def _sleep(self, index: int, value: int, seconds: float) -> None:
        """Sleep until the word is not `value`, or the time is over, or for no reason."""
        if self._number is None:
            time.sleep(min(seconds, 1e-4))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        where = ctypes.c_void_p(self._address + 4 * index)
        _syscall(self._number, where, _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)

    def _await(self, index: int, wanted: int, limit_s: float | None, whose: int) -> None:
        """Wait until a counter has come to `wanted`. Raises `RankError`."""
        words = self._words
        for _ in range(_SPINS):
            if _is_reached(words[index], wanted):
                return
        start_s = time.monotonic()
        while not _is_reached(value := words[index], wanted):
            self.raise_if_failed()
            if limit_s is not None and time.monotonic() - start_s > limit_s:
                raise RankError(
                    f"{self.name(whose)} is late by {limit_s:g} s: it hangs, or is overloaded"
                )
            self._sleep(index, value, _NAP_S)

    # --- life and failure ----------------------------------------------------------------------

    def beat_forever(self) -> None:
        """Give signs of life from a thread until the process ends."""
        assert self.rank is not None
        index = _word(self.rank, _BEAT)

        def beat() -> None:
            self._words[_word(self.rank or 0, _BEATING)] = threading.get_native_id()
            while True:
                value = self._words[index] = (self._words[index] + 1) & _MASK
                with contextlib.suppress(OSError):  # whose end the agents see
                    self._span.send([], index, value)
                time.sleep(BEAT_S)

        threading.Thread(target=beat, name="beat", daemon=True).start()

    def beats(self) -> list[int]:
        """Return how many signs of life each rank has given."""
        return [self._words[_word(rank, _BEAT)] for rank in range(self.size)]

    def beating(self, rank: int) -> int:
        """Return the thread that gives a rank's signs of life, on its host; 0: none does yet."""
        return self._words[_word(rank, _BEATING)]

    def serve(self) -> None:
        """Publish that the start of this rank is over: it gives signs of life without a pause."""
        assert self.rank is not None
        self._store(_word(self.rank, _STARTED), 1)

    def started(self) -> list[bool]:
        """Return of each rank whether its start is over."""
        return [bool(self._words[_word(rank, _STARTED)]) for rank in range(self.size)]

    def fail(self) -> None:
        """Have all that wait for another raise `RankError`, with the first that has failed."""
        if not self._words[_failed_word(self.size)]:
            self._store(_failed_word(self.size), 1 + (self.rank or 0))

    def raise_if_failed(self) -> None:
        """Raise `RankError` if a rank has failed."""
        if failed := self._words[_failed_word(self.size)]:
            raise RankError(f"{self.name(failed - 1)} has failed")

    # --- facts ---------------------------------------------------------------------------------

    def state(self, facts: bytes) -> None:
        """Publish what this rank says of itself, at most 4,088 bytes."""
        assert self.rank is not None
        assert len(facts) <= _FACT_BYTES - 8, f"{len(facts)} bytes of facts"
        begin = _facts_at(self.size) + self.rank * _FACT_BYTES
        self._put(begin, len(facts).to_bytes(8, "little") + facts)

    def facts(self) -> list[bytes]:
        """Return what every rank has stated; call it behind a meeting."""
        found = []
        for rank in range(self.size):
            begin = _facts_at(self.size) + rank * _FACT_BYTES
            length = int.from_bytes(self._memory[begin : begin + 8], "little")
            found.append(self._memory[begin + 8 : begin + 8 + length])
        return found

    # --- messages ------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send to all other ranks, from rank 0; waits while one of them is a whole ring behind."""
        most = _SLOT_BYTES - _HEAD_BYTES
        for begin in range(0, max(1, len(message)), most):
            piece = message[begin : begin + most]
            self._num_sent += 1
            for rank in range(1, self.size):
                wanted = self._num_sent - _SLOTS
                if wanted > 0:
                    self._await(_word(rank, _READ), wanted, self.limit_s, rank)
            at = self._slot(self._num_sent)
            has_more = begin + most < len(message)
            head = len(piece).to_bytes(4, "little") + has_more.to_bytes(4, "little")
            self._put(at, head + piece)
            self._store(_sent_word(self.size), self._num_sent)

    def receive(self) -> bytes:
        """Wait for the next message of rank 0. Raises `RankError` if a rank has failed."""
        assert self.rank is not None
        pieces: list[bytes] = []
        has_more = True
        while has_more:
            self._num_read += 1
            self._await(_sent_word(self.size), self._num_read, None, 0)
            at = self._slot(self._num_read)
            length = int.from_bytes(self._memory[at : at + 4], "little")
            has_more = self._memory[at + 4] != 0
            pieces.append(self._memory[at + _HEAD_BYTES : at + _HEAD_BYTES + length])
            self._store(_word(self.rank, _READ), self._num_read)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _slot(self, number: int) -> int:
        return _ring_at(self.size) + number % _SLOTS * _SLOT_BYTES

    # --- meetings ------------------------------------------------------------------------------

    def meet(self, members: Sequence[int] | None = None) -> None:
        """Wait until every rank has come to this meeting: what each wrote before is visible.

        `members` meet by themselves: a rank is always with the same ones; None: all meet. Raises
        `RankError` if one is later than `limit_s`, or has failed.
        """
        assert self.rank is not None
        which = _CAME if members is None else _MET
        self._num_meetings[which] += 1
        self._store(_word(self.rank, which), self._num_meetings[which])
        for rank in range(self.size) if members is None else members:
            if rank != self.rank:
                self._await(_word(rank, which), self._num_meetings[which], self.limit_s, rank)

    def gather(self, own: bytes) -> list[bytes]:
        """Return what every rank gives, by rank, on each; two meetings, so for the start alone."""
        self.state(own)
        self.meet()
        found = self.facts()
        self.meet()  # all have read before anyone states more
        return found

    def hand(self, count: int) -> None:
        """Publish that this rank has handed so many states to the next stage, in all."""
        assert self.rank is not None
        self._store(_word(self.rank, _HANDED), count)

    def await_handed(self, rank: int, count: int) -> None:
        """Wait until a rank has handed so many; raises `RankError` as `meet`."""
        self._await(_word(rank, _HANDED), count, self.limit_s, rank)

    def buffer(self, rank: int, turn: int) -> memoryview:
        """Return one of a rank's two exchange buffers, of `EXCHANGE_BYTES`.

        A rank writes to its own, meets the others, and reads theirs. As the two take turns, one
        meeting is enough: a rank that has come to the next one has read what this one was for.
        """
        begin = _buffer_at(self.size, rank, turn)
        return memoryview(self._memory)[begin : begin + EXCHANGE_BYTES]


def _word(rank: int, which: int) -> int:
    return (rank * _WORDS_OF_RANK + which) * (_LINE // 4)


def _sent_word(size: int) -> int:
    return _word(size, 0)


def _failed_word(size: int) -> int:
    return _word(size, 1)


def _facts_at(size: int) -> int:
    return _word(size + 1, 0) * 4


def _ring_at(size: int) -> int:
    return _facts_at(size) + size * _FACT_BYTES


def _exchange_at(size: int) -> int:
    return -(-(_ring_at(size) + _SLOTS * _SLOT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _buffer_at(size: int, rank: int, turn: int) -> int:
    return _exchange_at(size) + (2 * rank + turn) * EXCHANGE_BYTES


def num_bytes(size: int) -> int:
    """Return the bytes of the memory of so many ranks."""
    return _exchange_at(size) + 2 * size * EXCHANGE_BYTES
