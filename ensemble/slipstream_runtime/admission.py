"""Whether one more request may wait: the engine's load and bounds, and the file that tells them.

The engine alone decides. But a request that it refuses has been tokenised and sent to it, and where
more comes than fits there is no time to waste on that. So while it has work the engine tells its
load, twice a turn, in a small file that the processes of its server map; they refuse by the same
rule, in the same words, and pass on what may fit. What the file says was so at most a step ago.
Older than `MAX_AGE_NS` it says nothing: an engine that has ended, stands still or computes for long
refuses nobody through it.
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
UNKNOWN = -1.0  # a rate of which nothing is known yet
MAX_AGE_NS = 1_000_000_000
ON_THEIR_WAY_NS = 250_000_000  # to the engine's socket: behind a burst of responses it takes long


class Load(NamedTuple):
    """Requests that wait and never ran, their prompts' tokens, and how fast they are admitted.

    And how many requests, and tokens of their prompts, the engine has ever received, and when it
    last looked for more (`time.monotonic_ns()`, 0 for never). In a step it does not look.
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

    def check(self, num_tokens: int = 0) -> None:
        """Raise `ContractError` if one more request, with so long a prompt, may not wait.

        A prompt above the bound on tokens may wait alone. 0: its length is not known yet.
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
    """When so much more will have been admitted, at the recent rate."""
    if ms_each == UNKNOWN:
        return MAX_RETRY_MS
    return round(min(max(MIN_RETRY_MS, needed * ms_each), MAX_RETRY_MS))


_FIELDS = struct.Struct("<qqqqqqddqqq")  # time.monotonic_ns(), then a `Load`
_SUM = struct.Struct("<I")
_SIZE = _FIELDS.size + _SUM.size


def path_of(socket: Path) -> Path:
    """The file of the engine that listens at a socket."""
    return socket.with_suffix(".load")


def passed_path_of(socket: Path) -> Path:
    """The file of what was let through to that engine."""
    return socket.with_suffix(".passed")


class LoadFile:
    """The mapped file. One process writes, any number read; no call blocks."""

    def __init__(self, path: Path) -> None:
        """Map it; the first to come makes it. Where that cannot be, the engine alone refuses."""
        loss = "requests above the bounds are refused by the engine alone"
        self._map = map_if_possible(path, _SIZE, loss)

    def tell(self, load: Load, is_idle: bool = False) -> None:
        """This is the load now; nobody is to be refused by that of an engine without work."""
        fields = _FIELDS.pack(0 if is_idle else time.monotonic_ns(), *load)
        self._map[:] = fields + _SUM.pack(zlib.crc32(fields))

    def read(self) -> Load | None:
        """The load, if it was told not long ago; None also for what is being written just now."""
        load, is_recent = self.last()
        return load if is_recent else None

    def last(self) -> tuple[Load | None, bool]:
        """The load that was told last, and whether that was not long ago, by a busy engine."""
        data = self._map[:]
        fields = data[: _FIELDS.size]
        if _SUM.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(fields):
            return None, False
        told_ns, *values = _FIELDS.unpack(fields)
        is_recent = told_ns > 0 and 0 <= time.monotonic_ns() - told_ns <= MAX_AGE_NS
        return Load(*values), is_recent

    def check(self, num_tokens: int = 0) -> None:
        """As `Load.check`, by what the engine has told."""
        load = self.read()
        if load is not None:
            load.check(num_tokens)


class Passed:
    """What the processes of a stage have let through of late: a mapped file, a row for each.

    Each writes its own row, all read all; no call blocks. A row holds, of the last `_NUM_KEPT`
    requests, the time (ns, `time.monotonic_ns()`), the tokens, and what the engine had received
    before (requests and tokens); who takes it keeps it locked until the process ends.
    """

    _NUM_ROWS, _NUM_KEPT = MAX_INSTANCES, 512
    _SIZE = 32 * _NUM_ROWS * _NUM_KEPT

    def __init__(self, path: Path) -> None:
        """Map it; the first to come makes it. Where there is no row, this process counts alone."""
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
        """One more, now; the engine's load was told to be this one."""
        received = (load.num_received, load.num_received_tokens) if load else (0, 0)
        place = self._turn % self._NUM_KEPT
        self._turn += 1
        self._row[1:, place] = (num_tokens, *received)
        self._row[0, place] = time.monotonic_ns()

    def on_their_way(self, load: Load) -> tuple[int, int]:
        """Requests, and their tokens, of all processes, that this load does not tell of yet.

        What passed ON_THEIR_WAY_NS before the engine last looked it has found. Since each request
        that passed later, as many more are on their way as passed less what the engine has
        received; before it there were some or none. So there are at least as many as the most of
        these. What an engine before this one received is not its.
        """
        times_ns, _, before, _ = self._entries
        is_recent = times_ns > max(0, load.looked_ns - ON_THEIR_WAY_NS)
        recent = self._entries[:, is_recent & (before <= load.num_received)]
        if not recent.size:
            return 0, 0
        _, tokens, received, received_tokens = recent[:, recent[0].argsort()[::-1]]
        num_requests = np.arange(1, len(tokens) + 1) - (load.num_received - received)
        num_tokens = tokens.cumsum() - (load.num_received_tokens - received_tokens)
        return max(0, int(num_requests.max())), max(0, int(num_tokens.max()))

    def _take_row(self, path: Path) -> int:
        # Any close of the file would let go of the lock: it stays open.
        self._locked = path.open("r+b")
        for row in range(self._NUM_ROWS):
            with contextlib.suppress(BlockingIOError):
                fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
                return row
        raise OSError(f"{path}: all {self._NUM_ROWS} rows are taken")


class Gate:
    """Before a stage that passes requests on to the engine; for one thread of each process.

    What was let through a moment ago the engine does not tell yet. Where ten times as many come
    as go, each place that becomes free would let through all that come until it is told to be
    taken, and they would queue up for their refusal behind those that fit. So they wait too.
    """

    def __init__(self, file: LoadFile, passed: Passed) -> None:
        """`passed` is shared by the stage's processes."""
        self._file = file
        self._passed = passed

    def check(self, num_tokens: int = 0) -> Load | None:
        """As `Load.check`. Returns what was told last, however old: an idle engine tells none."""
        load, is_recent = self._file.last()
        if load is not None and is_recent:
            more_requests, more_tokens = self._passed.on_their_way(load)
            load._replace(
                num_requests=load.num_requests + more_requests,
                num_tokens=load.num_tokens + more_tokens,
            ).check(num_tokens)
        return load

    def enter(self, num_tokens: int) -> None:
        """Likewise; a request that may wait is now on its way."""
        self._passed.add(num_tokens, self.check(num_tokens))
