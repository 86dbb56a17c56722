"""Time how long a rank gives no sign of life, or stands still although it does.

The supervisor looks, and only time during which it looked counts: it may have been stopped itself.

Signs of life come from a thread of their own, which goes on while the rank itself hangs in a call:
a read from a file server that is gone, a write to a pipe that nobody reads, a lock. So progress is
read from the threads that work. The first thread of a rank that serves never waits long for one
thing: for other ranks it sleeps shortly, for messages a second at most, and its GPU it polls. A
rank that starts may wait longer, for a disk or a network, and other threads read weights meanwhile.

Processes that a rank has started, as compilers, count while they compute, read or write: the rank
may wait for them. One that sleeps, hangs or has ended says nothing of the rank, and neither do some
that look for something a thousand times a second, in a file or elsewhere: all together they compute
less than a tenth of the time, move less than 1 MB a second, and read from no disk and write to none
what was not there. A look that meets one as it runs starts the time anew. One that polls by more
than that, as by a shell that starts a program ten times a second, hides a rank that hangs.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from slipstream_runtime.processes import (
    Spent,
    could_run,
    descendants_of,
    progress_of,
    spent_by,
    threads_of,
)
from slipstream_runtime.ranks import RankMemory

SERVING_S = 4.0  # without progress, a rank that serves hangs: noticed within 5 s
_LOOK_S = 0.5
_MAX_GAP_S = 2.0  # between two looks, that counts
# What children do for a rank that waits for them, at least.
_LEAST_SHARE = 0.1  # of the time, computing
_LEAST_MOVED = 1 << 20  # bytes a second


class Silence:
    """Times how long a rank has given no sign of life.

    A rank that starts may hold the interpreter for seconds, as it imports libraries or sets a
    device up: one that works is alive.

    Args:
        memory: of the ranks.
        work: what a rank of this host has done so far, which changes while it does anything;
            None: it is of another host, which looks itself, or has ended.
    """

    def __init__(self, memory: RankMemory, work: Callable[[int], object | None]) -> None:
        self._memory, self._work = memory, work
        self._last: list[tuple[int, object]] = []
        self._seconds = [0.0] * memory.size
        self._looked_s = time.monotonic()

    def look(self) -> tuple[int, float]:
        """Return the rank that has been silent longest, and for how many seconds."""
        now_s = time.monotonic()
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MAX_GAP_S), now_s
        beats, started = self._memory.beats(), self._memory.started()
        signs = [
            (count, None if serves else self._work(rank))
            for rank, (count, serves) in enumerate(zip(beats, started, strict=True))
        ]
        for rank, before in enumerate(self._last):
            is_seen = started[rank] or signs[rank][1] is not None
            is_silent = signs[rank] == before and is_seen
            self._seconds[rank] = self._seconds[rank] + elapsed_s if is_silent else 0.0
        self._last = signs
        worst = max(range(len(beats)), key=self._seconds.__getitem__)
        return worst, self._seconds[worst]


class Stall(NamedTuple):
    """A rank that hangs, and for how long."""

    rank: int
    seconds: float

    @property
    def reason(self) -> str:
        """Return what there is to say of it."""
        return f"stood still for {self.seconds:.1f} s while it gave signs of life"


class Stalls:
    """Times how long a rank has stood still.

    Args:
        memory: of the ranks.
        pid_of: the process of a rank of this host; 0: it is of another, or not there.
        starting_s: time without progress that a rank has while it starts.
    """

    def __init__(self, memory: RankMemory, pid_of: Callable[[int], int], starting_s: float) -> None:
        self._memory, self._pid_of, self._starting_s = memory, pid_of, starting_s
        self._last: list[object] = [None] * memory.size
        self._seconds = [0.0] * memory.size
        self._spent: list[dict[int, Spent]] = [{} for _ in range(memory.size)]
        self._looked_s = time.monotonic()

    def look(self) -> Stall | None:
        """Return the first rank that hangs; None: there is none, or it is early to look again."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return None
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MAX_GAP_S), now_s
        for rank, serves in enumerate(self._memory.started()):
            pid = self._pid_of(rank)
            threads = [each for each in threads_of(pid) if each != self._memory.beating(rank)]
            if pid not in threads:
                continue
            watched = [pid] if serves else threads
            children = descendants_of(pid)
            done = (serves, progress_of(pid, watched))
            before, self._last[rank] = self._last[rank], done
            spent_before, self._spent[rank] = self._spent[rank], spent_by(children)
            is_still = done == before and not any(
                [
                    _get_on(spent_before, self._spent[rank], elapsed_s),
                    could_run(pid, threads),
                    *(could_run(child, threads_of(child)) for child in children),
                ]
            )
            self._seconds[rank] = self._seconds[rank] + elapsed_s if is_still else 0.0
            if self._seconds[rank] >= (SERVING_S if serves else self._starting_s):
                return Stall(rank, self._seconds[rank])
        return None


def _get_on(before: Mapping[int, Spent], now: Mapping[int, Spent], elapsed_s: float) -> bool:
    """Return whether children did something that a rank may wait for, since the look before."""
    computed_s, moved = 0.0, 0
    for pid, spent in now.items():
        last = before.get(pid, Spent())
        if spent.stored > last.stored:
            return True
        computed_s += spent.computed_s - last.computed_s
        moved += spent.moved - last.moved
    return computed_s > _LEAST_SHARE * elapsed_s or moved > _LEAST_MOVED * elapsed_s
