"""The processes of an engine's ranks, which live and die together."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from slipstream_runtime.processes import end, work_of
from slipstream_runtime.ranks import RankMemory
from slipstream_runtime.stalls import Silence, Stalls

_log = logging.getLogger(__name__)
SILENT_S = 3.0  # a rank that gives no sign of life for so long hangs
WORDS_S = 10.0  # time for ranks to say why they refuse to start, once another has
_SAY_S = 0.3  # time for a rank that hangs to write where it is


def silence(seconds: float) -> str:
    """Return what there is to say of a rank that has been silent for so long."""
    return f"gave no sign of life for {seconds:.1f} s"


class RankProcesses:
    """The memory that `size` ranks share, and the processes of all but rank 0.

    One rank alone shares nothing: then there is no process, and no rank is ever silent.
    """

    def __init__(self, size: int, stuck_after_s: float) -> None:
        self.size = size
        self.environment: dict[str, str] = {}  # of ranks, beside that of this process
        self._numbers = range(1, size)  # of the processes
        self.ended: list[int] = []  # descriptors that are readable once a process has ended
        self._processes: list[subprocess.Popen[bytes]] = []
        self._descriptor = RankMemory.create(size) if size > 1 else -1
        self._silence: Silence | None = None
        self._stalls: Stalls | None = None
        self._engine = 0  # process id
        if size > 1:
            memory = RankMemory(self._descriptor, size)
            self._silence = Silence(memory, self._work)
            self._stalls = Stalls(memory, self._pid, stuck_after_s)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that a rank's process inherits."""
        return [self._descriptor] if self.size > 1 else []

    @property
    def options(self) -> list[str]:
        """Arguments by which a rank's process finds the memory."""
        return ["--ranks", str(self._descriptor)] if self.size > 1 else []

    def _work(self, rank: int) -> object | None:
        """Return what a rank of this host has done, see `work_of`."""
        pid = self._pid(rank)
        return work_of(pid) if pid else None

    def _pid(self, rank: int) -> int:
        """Return the process of a rank of this host; 0: it is of another, or not there yet."""
        pids = [self._engine, *(process.pid for process in self._processes)]
        return pids[rank] if rank < len(pids) else 0

    def name(self, rank: int) -> str:
        """Return a rank, and its host if there are several."""
        return f"rank {rank}"

    def start(self, config: str, engine: int, before: Callable[[], Callable[[], None]]) -> None:
        """Start ranks 1, 2, ...; `before` makes what each does before it runs Python.

        `engine` is the process id of rank 0.
        """
        self._engine = engine
        for rank in self._numbers:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "slipstream.engine.rank"),
                    *("--config", config, "--rank", str(rank), *self.options),
                ],
                stdin=subprocess.DEVNULL,
                preexec_fn=before(),
                env={**os.environ, **self.environment},
                pass_fds=self.descriptors,
            )
            self._processes.append(process)
            self.ended.append(os.pidfd_open(process.pid))

    def code(self, quiet: int) -> int | None:
        """Return the exit code of a rank that has ended, and log it; None: all run.

        The code `quiet` is not logged: such a rank has said why, and that line is to be the last.
        """
        for rank, process in zip(self._numbers, self._processes, strict=False):
            if (code := process.poll()) is not None:
                if code == quiet:
                    return code
                _log.error("%s (pid %d) ended with code %d", self.name(rank), process.pid, code)
                return code
        return None

    def kill_hanging(self, engine: subprocess.Popen[bytes]) -> None:
        """Kill a rank that is silent for `SILENT_S`, or stands still; `engine` is rank 0."""
        if self._silence is None or self._stalls is None:
            return
        rank, seconds = self._silence.look()
        if seconds >= SILENT_S:
            self._kill(rank, silence(seconds), engine)
        elif (stall := self._stalls.look()) is not None:
            self._kill(stall.rank, stall.reason, engine)

    def report(self, code: int) -> None:
        """Report to other hosts how rank 0 has ended; there are none."""

    def _kill(self, rank: int, reason: str, engine: subprocess.Popen[bytes]) -> None:
        """Kill a rank of this host that hangs."""
        process = [engine, *self._processes][rank]
        _log.error("%s (pid %d) %s", self.name(rank), process.pid, reason)
        process.send_signal(signal.SIGUSR1)  # writes its stacks to the log, if it still can
        time.sleep(_SAY_S)
        process.kill()

    def end(self) -> None:
        """Kill all, at once: one that waits for another takes no other signal."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            end(process, 1.0)
        for descriptor in (*self.ended, *self.descriptors):
            os.close(descriptor)
        self.ended.clear()
        self._processes.clear()
        self._silence = self._stalls = None  # they refer to this object: memory would stay mapped
        self.size = 1
