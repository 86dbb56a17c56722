"""The ranks of one host of several: their memory, their processes, and the other hosts."""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable

from slipstream_runtime.processes import end, work_of
from slipstream_runtime.rank_processes import SILENT_S, WORDS_S, RankProcesses, silence
from slipstream_runtime.ranks import RankMemory, num_bytes
from slipstream_runtime.rendezvous import Gate, Member, Place, RendezvousError, connect, join
from slipstream_runtime.span import Inlet, Peers, exported, names
from slipstream_runtime.stalls import Silence, Stalls

_log = logging.getLogger(__name__)
_LOOK_S = 0.25


class SpannedRanks(RankProcesses):
    """The ranks of the host of rank 0, whose supervisor this is; see `RankProcesses`."""

    def __init__(
        self, place: Place, version: str, stuck_after_s: float, is_over: Callable[[], bool]
    ) -> None:
        """Wait for the other hosts, unless `is_over`. Raises `RendezvousError`, or OSError."""
        super().__init__(place.size, stuck_after_s)
        self._peers: Peers | None = None
        self._numbers = range(1, place.num)
        self._place = place
        memory = RankMemory(self._descriptor, place.size)
        self._memory = memory
        try:
            self._gate = Gate(place, version)
        except BaseException:
            super().end()
            raise
        self._inlet = Inlet(self._gate.address, memory.apply, num_bytes(place.size))
        try:
            peers = self._gate.gather(self._inlet.port, is_over)
        except BaseException:
            self.end()
            raise
        self._peers = peers
        if peers is not None:
            _log.info("all hosts are here: %s", names(peers.hosts))
            self._inlet.open(peers.token)
            self.environment = exported(peers)

    def name(self, rank: int) -> str:
        """Return a rank, and its host."""
        return super().name(rank) if self._peers is None else self._peers.name(rank)

    def start(self, config: str, engine: int, before: Callable[[], Callable[[], None]]) -> None:
        """Start this host's other ranks, and watch the other hosts."""
        super().start(config, engine, before)
        self.ended += [os.dup(link.fileno()) for _, link in self._gate.links]

    def code(self, quiet: int) -> int | None:
        """Return the exit code of a rank that has ended, here or elsewhere; see `RankProcesses`."""
        found = super().code(quiet)
        if found is None and (other := self._gate.ended()) is not None:
            what, found = other
            _log.error("%s", what)
        return found

    def kill_hanging(self, engine: subprocess.Popen[bytes]) -> None:
        """Kill a rank that hangs; if it is elsewhere and silent, rank 0, and so all."""
        assert self._silence is not None
        assert self._stalls is not None
        rank, seconds = self._silence.look()
        if seconds < SILENT_S:
            if (stall := self._stalls.look()) is not None:
                self._kill(stall.rank, stall.reason, engine)
            return
        if rank < self._place.num:
            self._kill(rank, silence(seconds), engine)
            return
        _log.error("%s %s: all ranks are started again", self.name(rank), silence(seconds))
        engine.kill()

    def report(self, code: int) -> None:
        """Report to other hosts how rank 0 has ended."""
        self._gate.report(code)

    def end(self) -> None:
        """Kill this host's ranks; the other hosts end theirs."""
        self._gate.close()
        self._inlet.close()
        super().end()


def serve_host(
    place: Place,
    version: str,
    command: Callable[[int, int], list[str]],
    before: Callable[[], Callable[[], None]],
    limit_s: float,
    stuck_after_s: float,
    quiet: int,
) -> int:
    """Run the ranks of another host once, until one ends or rank 0 does.

    `command` makes a rank's command, of its number and the memory's descriptor. Returns the exit
    code of the rank that ended first. If it is `quiet`, the others have time to say why, too.
    Raises `RendezvousError`, or OSError.
    """
    link = connect(place, limit_s)
    descriptor = RankMemory.create(place.size)
    memory = RankMemory(descriptor, place.size)
    inlet = Inlet(str(link.getsockname()[0]), memory.apply, num_bytes(place.size))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        member = join(place, link, inlet.port, version)
        inlet.open(member.peers.token)
        _log.info("all hosts are here: %s", names(member.peers.hosts))
        environment = {**os.environ, **exported(member.peers)}
        for rank in range(place.first, place.first + place.num):
            processes.append(
                subprocess.Popen(
                    command(rank, descriptor),
                    stdin=subprocess.DEVNULL,
                    preexec_fn=before(),
                    env=environment,
                    pass_fds=[descriptor],
                )
            )
        code = _watch(member, memory, processes, stuck_after_s)
        if code == quiet:
            _await_words(processes)
        return code
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            end(process, 1.0)
        inlet.close()
        link.close()
        os.close(descriptor)


def _await_words(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until ranks have ended, but not for one that waits for another."""
    end_s = time.monotonic() + WORDS_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))


def _watch(
    member: Member,
    memory: RankMemory,
    processes: list[subprocess.Popen[bytes]],
    stuck_after_s: float,
) -> int:
    """Return the exit code of the first rank of this host that ends, or of rank 0."""
    first = member.place.first

    def pid(rank: int) -> int:
        own = first <= rank < first + len(processes)
        return processes[rank - first].pid if own else 0

    silences = Silence(memory, lambda rank: work_of(pid(rank)) if pid(rank) else None)
    stalls = Stalls(memory, pid, stuck_after_s)
    while True:
        for rank, process in enumerate(processes, start=first):
            if (code := process.poll()) is not None:
                member.end(rank, code)
                return code
        if (code := member.code(_LOOK_S)) is not None:
            return code
        rank, seconds = silences.look()
        if seconds >= SILENT_S:
            reason = silence(seconds)
        elif (stall := stalls.look()) is not None:
            rank, reason = stall.rank, stall.reason
        else:
            continue
        _log.error("%s %s", member.peers.name(rank), reason)
        if not pid(rank):
            return 1
        processes[rank - first].kill()


__all__ = ["Place", "RendezvousError", "SpannedRanks", "serve_host"]
