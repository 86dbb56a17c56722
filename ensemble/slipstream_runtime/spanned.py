"""The ranks of one host of several: their memory, their processes, and the other hosts."""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable

from slipstream_runtime.processes import end, work_of
from slipstream_runtime.rank_processes import SILENT_S, WORDS_S, RankProcesses
from slipstream_runtime.ranks import RankMemory, Silence, close_quietly, num_bytes
from slipstream_runtime.rendezvous import Gate, Member, Place, RendezvousError, connect, join
from slipstream_runtime.span import Inlet, Peers, exported, names

_log = logging.getLogger(__name__)
_LOOK_S = 0.25


class SpannedRanks(RankProcesses):
    """The ranks of the host of rank 0, whose supervisor this is; see `RankProcesses`."""

    def __init__(self, place: Place, version: str, is_over: Callable[[], bool]) -> None:
        """Wait for the other hosts, unless `is_over`. Raises `RendezvousError`, or OSError."""
        super().__init__(place.size)
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

    def kill_silent(self, engine: subprocess.Popen[bytes]) -> None:
        """Kill a rank that gives no sign of life; if it is elsewhere, rank 0, and so all."""
        assert self._silence is not None
        rank, seconds = self._silence.look()
        if seconds < SILENT_S:
            return
        if rank < self._place.num:
            self._kill(rank, seconds, engine)
            return
        name = self.name(rank)
        _log.error("%s gave no sign of life for %.1f s: all ranks are started again", name, seconds)
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
        code = _watch(member, memory, processes)
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
        close_quietly(descriptor)


def _await_words(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until ranks have ended, but not for one that waits for another."""
    end_s = time.monotonic() + WORDS_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))


def _watch(member: Member, memory: RankMemory, processes: list[subprocess.Popen[bytes]]) -> int:
    """Return the exit code of the first rank of this host that ends, or of rank 0."""
    first = member.place.first

    def work(rank: int) -> object | None:
        own = first <= rank < first + len(processes)
        return work_of(processes[rank - first].pid) if own else None

    silence = Silence(memory, work)
    while True:
        for rank, process in enumerate(processes, start=first):
            if (code := process.poll()) is not None:
                member.end(rank, code)
                return code
        if (code := member.code(_LOOK_S)) is not None:
            return code
        rank, seconds = silence.look()
        if seconds < SILENT_S:
            continue
        _log.error("%s gave no sign of life for %.1f s", member.peers.name(rank), seconds)
        if not first <= rank < first + len(processes):
            return 1
        processes[rank - first].kill()


__all__ = ["Place", "RendezvousError", "SpannedRanks", "serve_host"]
