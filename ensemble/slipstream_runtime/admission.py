"""Decide whether one more request may wait, by the engine's load and limits, in each process.

The engine alone decides. But a request that it refuses has been tokenised and sent to it, which
costs time that an overloaded server does not have. So a busy engine publishes its load, twice a
turn, in a small file that the processes of its server map. They refuse by the same rule, in the
same words, and pass on what may fit. The file is at most a step old. Older than `MAX_AGE_NS` it
does not count: an engine that has ended, hangs or is in a long step refuses nothing through it.
"""

import contextlib
import fcntl
import logging
import mmap
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from slipstream_contract.errors import Code, ContractError

from slipstream_runtime.mapped import map_file, map_if_possible
from slipstream_runtime.processes import MAX_INSTANCES

_log = logging.getLogger(__name__)

MIN_RETRY_MS, MAX_RETRY_MS = 50, 30_000
UNKNOWN = -1.0  # a rate that has not been measured yet
MAX_AGE_NS = 1_000_000_000
IN_TRANSIT_NS = 250_000_000  # time to reach the engine, at most: long after a burst of responses


class Load(NamedTuple):
    """Requests that wait and never ran, their prompts' tokens, limits, and admission rates.

    `num_received` and `num_received_tokens` count all requests that the engine ever received;
    `looked_ns` is when it last looked for more (`time.monotonic_ns()`, 0 for never). It does not
    look during a step.
    """

    num_requests: int
    num_tokens: int
    num_running: int  # sequences
    max_requests: int
    max_tokens: int
    ms_per_request: float = UNKNOWN
    ms_per_token: float = UNKNOWN
    num_received: int = 0
    num_received_tokens: int = 0
    looked_ns: int = 0

    def raise_if_full(self, num_tokens: int = 0) -> None:
        """Raise `ContractError` if one more request, with a prompt of `num_tokens`, may not wait.

        0: the length is not known yet. A prompt above the limit of tokens may wait alone.
        """
        excess = self.num_tokens + num_tokens - self.max_tokens
        if self.num_requests >= self.max_requests:
            reason, bound = "max_waiting", f"max_waiting is {self.max_requests}"
            retry_ms = _retry_ms(1, self.ms_per_request)
        elif num_tokens and self.num_requests and excess > 0:
            reason = "max_waiting_tokens"
            bound = f"{reason} is {self.max_tokens}, this prompt has {num_tokens}"
            retry_ms = _retry_ms(excess, self.ms_per_token)
        else:
            return
        raise ContractError(
            f"the engine is full: {self.num_requests} requests wait with {self.num_tokens} tokens, "
            f"{bound} ({self.num_running} sequences are running); retry_after_ms: {retry_ms}",
            Code.UNAVAILABLE,
            reason,
        )


def _retry_ms(needed: int, ms_each: float) -> int:
    """Return the ms until `needed` more will have been admitted, at the recent rate."""
    if ms_each == UNKNOWN:
        return MAX_RETRY_MS
    return round(min(max(MIN_RETRY_MS, needed * ms_each), MAX_RETRY_MS))


_FIELDS = struct.Struct("<qqqqqqddqqq")  # time.monotonic_ns(), then a `Load`
_MOST = 2**63 - 1  # of a field
_SUM = struct.Struct("<I")
_SIZE = _FIELDS.size + _SUM.size


def path_of(socket: Path) -> Path:
    """Return the load file of the engine that listens at a socket."""
    return socket.with_suffix(".load")


def passed_path_of(socket: Path) -> Path:
    """Return the file of what was passed on to the engine that listens at a socket."""
    return socket.with_suffix(".passed")


class LoadFile:
    """The mapped load of the engine. One process writes, any number read; no call blocks."""

    def __init__(self, path: Path) -> None:
        """Map the file, making it if missing. If that fails, the engine alone refuses."""
        loss = "requests above the bounds are refused by the engine alone"
        self._map = map_if_possible(path, _SIZE, loss)

    def publish(self, load: Load, is_idle: bool = False) -> None:
        """Write the load, its counts as far as 63 bits hold them.

        That of an idle engine counts as outdated: it refuses nothing.
        """
        values = [min(value, _MOST) if type(value) is int else value for value in load]
        fields = _FIELDS.pack(0 if is_idle else time.monotonic_ns(), *values)
        self._map[:] = fields + _SUM.pack(zlib.crc32(fields))

    def read(self) -> Load | None:
        """Return the load if it is recent; None also while it is being written."""
        load, is_recent = self.last()
        return load if is_recent else None

    def last(self) -> tuple[Load | None, bool]:
        """Return the last load, and whether it is recent and of a busy engine."""
        data = self._map[:]
        fields = data[: _FIELDS.size]
        if _SUM.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(fields):
            return None, False
        told_ns, *values = _FIELDS.unpack(fields)
        is_recent = told_ns > 0 and 0 <= time.monotonic_ns() - told_ns <= MAX_AGE_NS
        return Load(*values), is_recent

    def raise_if_full(self, num_tokens: int = 0) -> None:
        """Raise as `Load.raise_if_full` does, if the load is recent."""
        load = self.read()
        if load is not None:
            load.raise_if_full(num_tokens)


class Passed:
    """The requests that a stage has lately passed on: a mapped file with a row per process.

    Each process writes its own row and reads all; no call blocks. For each of the last `_NUM_KEPT`
    requests, a row has the time (ns, `time.monotonic_ns()`), the prompt's tokens, and how many
    requests and tokens the engine had received before. A process locks its row until it ends.
    """

    _NUM_ROWS, _NUM_KEPT = MAX_INSTANCES, 512
    _SIZE = 32 * _NUM_ROWS * _NUM_KEPT

    def __init__(self, path: Path) -> None:
        """Map the file, making it if missing. Without a free row, this process counts alone."""
        try:
            self._map = map_file(path, self._SIZE)
            row = self._take_row(path)
        except OSError as error:
            _log.warning("%s: what other processes let through is not counted", error)
            self._map, row = mmap.mmap(-1, self._SIZE), 0
        self._entries = np.frombuffer(self._map, np.int64).reshape(4, -1, self._NUM_KEPT)
        self._row = self._entries[:, row]
        self._turn = 0

    def add(self, num_tokens: int, load: Load | None) -> None:
        """Note that a request was passed on just now; `load` is the last that was published."""
        received = (load.num_received, load.num_received_tokens) if load else (0, 0)
        place = self._turn % self._NUM_KEPT
        self._turn += 1
        self._row[1:, place] = (num_tokens, *received)
        self._row[0, place] = time.monotonic_ns()

    def in_transit(self, load: Load) -> tuple[int, int]:
        """Return how many requests, and tokens, of all processes this load does not count yet.

        A request passed on IN_TRANSIT_NS before the engine last looked has been found. From each
        later request on, the number in transit is what was passed on since, less what the engine
        has received since; the largest of these numbers is a lower bound. What an earlier engine
        has received does not count.
        """
        times_ns, _, before, _ = self._entries
        is_recent = times_ns > max(0, load.looked_ns - IN_TRANSIT_NS)
        recent = self._entries[:, is_recent & (before <= load.num_received)]
        if not recent.size:
            return 0, 0
        _, tokens, received, received_tokens = recent[:, recent[0].argsort()[::-1]]
        num_requests = np.arange(1, len(tokens) + 1) - (load.num_received - received)
        num_tokens = tokens.cumsum() - (load.num_received_tokens - received_tokens)
        return max(0, int(num_requests.max())), max(0, int(num_tokens.max()))

    def _take_row(self, path: Path) -> int:
        # Closing any descriptor of the file would release the lock: it stays open.
        self._locked = path.open("r+b")
        for row in range(self._NUM_ROWS):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
                return row
        raise OSError(f"{path}: all {self._NUM_ROWS} rows are taken")


class Gate:
    """The admission check of a stage that passes requests on to the engine; one thread per process.

    The engine does not count yet what was passed on a moment ago. With ten times more arriving than
    it can serve, every place that becomes free would let through all that arrive until the engine
    reports it taken, and the excess would queue for its refusal among the requests that fit. So
    this check counts requests in transit as waiting.
    """

    def __init__(self, file: LoadFile, passed: Passed) -> None:
        """`passed` is shared by the stage's processes."""
        self._file = file
        self._passed = passed

    def raise_if_full(self, num_tokens: int = 0) -> Load | None:
        """Raise as `Load.raise_if_full` does. Return the last load, outdated or not."""
        load, is_recent = self._file.last()
        if load is not None and is_recent:
            more_requests, more_tokens = self._passed.in_transit(load)
            load._replace(
                num_requests=load.num_requests + more_requests,
                num_tokens=load.num_tokens + more_tokens,
            ).raise_if_full(num_tokens)
        return load

    def pass_on(self, num_tokens: int) -> None:
        """Raise as `raise_if_full` does, else note the request as passed on."""
        self._passed.add(num_tokens, self.raise_if_full(num_tokens))
