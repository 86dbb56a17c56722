"""Start the engine's process and keep it running for as long as the tritonserver lives.

    python -m slipstream.launch --runtime DIR --folder NAME --server PID --lock FD

The bridge that gets the lock of its engine starts this supervisor and passes the lock on, so there
is only one for each engine; if the supervisor dies, any bridge starts the next. The engine's output
goes to `engine.log`. If the engine cannot start (exit code 2) and has never run, its reason goes to
`engine.error`, where the bridges read it. An engine that has run before is restarted for ever,
with pauses that grow to 10 s. An engine whose loop makes no turn for `stuck_after_s` is killed. One
that ends because its models were unloaded (exit code 3) is started again by the next bridge.

With `tensor_parallel` or `pipeline_parallel` the engine is rank 0 of several processes: if one
ends, gives no sign of life or stands still, all are killed and started again. With `replicas` a
router (`replicas/`) runs in the engine's place; it starts a supervisor like this one for each
engine behind it.
"""

import argparse
import contextlib
import ctypes
import fcntl
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
from slipstream_runtime import failed_starts
from slipstream_runtime.directory import OWNER_VARIABLE, VARIABLE, Runtime
from slipstream_runtime.processes import end
from slipstream_runtime.rank_processes import WORDS_S, RankProcesses
from slipstream_runtime.ranks import MAX_RANKS
from slipstream_runtime.rendezvous import RendezvousError, place_of
from slipstream_runtime.spanned import SpannedRanks
from slipstream_runtime.turns import Standstill, path_of

from slipstream import __version__
from slipstream.config import EngineConfig

_log = logging.getLogger(__name__)

CANNOT_START = 2  # exit code of an engine that cannot start
UNUSED = 3  # exit code of an engine whose models were unloaded
_MAX_EARLY_ENDS = 5  # in a row, of an engine that was never ready
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0
_FAILED_PAUSE_S = 30.0  # until an engine that could not start is tried again
_STEADY_S = 5.0  # after an engine that served this long, pauses are short again
_END_S = 3.0  # from SIGTERM to SIGKILL
_PARKED_S = 1.0  # between two looks of a supervisor without an engine
_REASON = "slipstream engine: "  # a process that cannot start says so behind it
_SAY_S = 0.3  # time for a stuck engine to write where it is
_SET_PARENT_DEATH_SIGNAL = 1


# --- the bridge's side -------------------------------------------------------------------------


class SupervisorStarter:
    """Starts the supervisor if none runs. There is one for each bridge."""

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        server_pid: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables that the engine gets beside those of this process."""
        self._runtime = runtime
        self._config = config
        self._environment = environment or {}
        self._server_pid = server_pid
        self._old = _identity(runtime.error)
        self._old_count = _identity(runtime.failed_starts)  # maybe of an earlier server
        self._seen: tuple[int, int] | None = None  # the newest failure, first seen at `_seen_s`
        self._seen_s = 0.0
        self._children: list[subprocess.Popen[bytes]] = []

    def failure(self) -> str | None:
        """Return why the engine could not start, if it failed during this bridge's life."""
        found = _identity(self._runtime.error)
        if found is None or found == self._old:
            return None
        if found != self._seen:
            self._seen, self._seen_s = found, time.monotonic()
        try:
            return self._runtime.error.read_text(errors="replace").strip() or "no reason given"
        except FileNotFoundError:
            return None

    def outage(self) -> str:
        """Return, in one line for clients, that there is no engine and why; for while none is."""
        failed = failed_starts.read(self._runtime.failed_starts)
        if failed is None or _identity(self._runtime.failed_starts) == self._old_count:
            return failed_starts.RESTARTED
        return (
            f"the engine is not running: {failed}; it is started again after a pause; its log is "
            f"{self._runtime.log}"
        )

    def ensure(self) -> None:
        """Start the supervisor unless a process has its lock.

        Raises OSError if it cannot start, and RuntimeError for `_FAILED_PAUSE_S` after the engine
        could not start.
        """
        self._children = [child for child in self._children if child.poll() is None]
        with self._runtime.lock.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            failure = self.failure()
            if failure and time.monotonic() - self._seen_s < _FAILED_PAUSE_S:
                raise RuntimeError(failure)
            self._runtime.error.unlink(missing_ok=True)
            self._runtime.unloaded.unlink(missing_ok=True)
            if self._old_count is not None and _identity(self._runtime.failed_starts) == (
                self._old_count
            ):
                self._runtime.failed_starts.unlink(missing_ok=True)
            self._runtime.config.write_bytes(msgspec.json.encode(self._config))
            with self._runtime.log.open("ab") as log:
                self._children.append(
                    subprocess.Popen(
                        self._command(lock.fileno()),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={
                            **os.environ,
                            **self._environment,
                            VARIABLE: str(self._runtime.directory),
                        },
                        pass_fds=[lock.fileno()],
                        process_group=0,  # not a session: see slipstream_serve.spawn
                    )
                )

    def stop(self) -> None:
        """End the supervisors that this process started, and with them their engines."""
        for child in self._children:
            end(child, _END_S + 1.0)

    def _command(self, lock: int) -> list[str]:
        python = os.environ.get("SLIPSTREAM_PYTHON") or shutil.which("python3") or "python3"
        return [
            *(python, "-P", "-m", "slipstream.launch"),
            *("--runtime", str(self._runtime.directory)),
            *("--folder", self._runtime.folder),
            *("--server", os.environ.get(OWNER_VARIABLE) or str(self._server_pid)),
            *("--lock", str(lock)),
        ]


# --- the supervisor's process ------------------------------------------------------------------


class Supervisor:
    """Runs one engine after the other."""

    def __init__(self, runtime: Runtime, lock: int, server_pid: int) -> None:
        self._runtime = runtime
        self._lock = lock
        config = _read_config(runtime.config)
        self._stuck_after_s, self._num_ranks = config.stuck_after_s, config.num_ranks
        self._module = "slipstream.engine.process"
        if config.replicas > 1:  # a router, which has engines and supervisors of its own
            self._module, self._num_ranks = "slipstream.replicas.process", 1
        self._server = os.pidfd_open(server_pid)
        self._was_ready = False
        self._ready_s: float | None = None  # when this engine was ready
        self._num_early_ends = 0

    def run(self) -> int:
        """Run engines until the server ends (return 0) or none is to be run any more (return 1)."""
        pause_s, was_short = _FIRST_PAUSE_S, False
        while True:
            self._ready_s = None
            output = self._runtime.log.stat().st_size if self._runtime.log.exists() else 0
            code = self._run_engine()
            if code is None:
                return 0
            if code == UNUSED:
                return self._park()
            said = self._why(output)
            _log.error("the engine ended with code %d", code)
            has_served = self._has_served()
            # The first to end soon after it was ready has crashed; more of them cannot start.
            if not has_served and (was_short or self._ready_s is None):
                failed_starts.note(self._runtime.failed_starts, code, said)
            was_short = not has_served
            if not self._was_ready and self._gives_up(code):
                draft = self._runtime.error.with_suffix(".draft")
                draft.write_text(f"{said}\n")
                draft.rename(self._runtime.error)  # atomically: a reader gets all or nothing
                return 1
            pause_s = _FIRST_PAUSE_S if has_served else min(2 * pause_s, _MAX_PAUSE_S)
            if self._is_server_gone(pause_s):
                return 0

    def _park(self) -> int:
        """Release the lock; return 0 once the server ends, or 1 once there is a successor."""
        before = _identity(self._runtime.config)
        with contextlib.suppress(OSError):
            self._runtime.unloaded.touch()
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        while not self._is_server_gone(_PARKED_S):
            if _identity(self._runtime.config) != before:
                return 1
        return 0

    def _gives_up(self, code: int) -> bool:
        self._num_early_ends += 1
        return code == CANNOT_START or self._num_early_ends == _MAX_EARLY_ENDS

    def _run_engine(self) -> int | None:
        """Run one engine; return its exit code, or None if the server has ended."""
        self._runtime.socket.unlink(missing_ok=True)
        standstill = Standstill(path_of(self._runtime.address))
        try:
            ranks = self._ranks()
        except (RendezvousError, OSError) as error:
            print(f"{_REASON}{error}", file=sys.stderr, flush=True)
            return CANNOT_START
        if self._is_server_gone(0):
            ranks.end()
            return None
        engine = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", self._module),
                *("--config", str(self._runtime.config)),
                *("--socket", self._runtime.address),
                *("--memory-lock", str(self._runtime.memory_lock)),
                *ranks.options,
            ],
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
            env={**os.environ, **ranks.environment},
            pass_fds=ranks.descriptors,
        )
        try:
            ranks.start(str(self._runtime.config), engine.pid, die_with_parent)
            ended = os.pidfd_open(engine.pid)
            try:
                watched = [ended, *ranks.ended, self._server]
                while not select.select(watched, [], [], 1.0 / ranks.size)[0]:
                    self._look_if_ready()
                    if standstill.look() > self._stuck_after_s:
                        _kill_stuck(engine, self._stuck_after_s)
                    ranks.kill_hanging(engine)
            finally:
                os.close(ended)
            self._look_if_ready()
            if self._is_server_gone(0):
                return None
            code = _code_of(engine, ranks)
            ranks.report(code)
            return code
        finally:
            ranks.end()
            end(engine, _END_S)
            self._runtime.socket.unlink(missing_ok=True)

    def _ranks(self) -> RankProcesses:
        """Make what the ranks share; wait for other hosts, if the environment says that there are.

        Raises `RendezvousError`, or OSError.
        """
        place = place_of(os.environ, self._num_ranks)
        if place is None:
            return RankProcesses(self._num_ranks, self._stuck_after_s)
        if place.first:
            raise RendezvousError(f"rank {place.first} does not serve: run `slipstream rank` there")
        is_gone = partial(self._is_server_gone, 0)
        return SpannedRanks(place, __version__, self._stuck_after_s, is_gone)

    def _look_if_ready(self) -> None:
        if self._runtime.socket.exists():
            self._was_ready = True
            self._ready_s = self._ready_s or time.monotonic()
        if self._has_served():
            self._runtime.failed_starts.unlink(missing_ok=True)

    def _has_served(self) -> bool:
        """Return whether this engine was ready long enough for its start to be a success."""
        return self._ready_s is not None and time.monotonic() - self._ready_s > _STEADY_S

    def _is_server_gone(self, wait_s: float) -> bool:
        return bool(select.select([self._server], [], [], wait_s)[0])

    def _why(self, offset: int) -> str:
        """Return what a process that cannot start has said, or the last line of all.

        Others may write as they end, whichever of them is the last.
        """
        with self._runtime.log.open("rb") as log:
            log.seek(offset)
            lines = log.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        reasons = [line.removeprefix(_REASON) for line in said if line.startswith(_REASON)]
        return (reasons or said or ["it said nothing"])[-1]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return inode and mtime of a file as it was written last: an identity, not a time."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns


def _read_config(path: Path) -> EngineConfig:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.DecodeError):
        config = EngineConfig(checkpoint="")
    sizes = config.tensor_parallel, config.pipeline_parallel
    if min(sizes) >= 1 and config.num_ranks <= MAX_RANKS:
        return config
    config = msgspec.structs.replace(config, pipeline_parallel=1)
    return msgspec.structs.replace(config, tensor_parallel=1)  # the engine reports what is wrong


def _code_of(engine: subprocess.Popen[bytes], ranks: RankProcesses) -> int:
    """Return the exit code of an engine one of whose processes has ended."""
    code = ranks.code(quiet=CANNOT_START)
    if code == CANNOT_START:  # rank 0 compares, too, and says to its log in what a rank differs
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(WORDS_S)
    if code is not None and engine.poll() is None:
        engine.kill()
    elif ranks.size > 1 and engine.wait() < 0:
        _log.error("%s (pid %d) ended with code %d", ranks.name(0), engine.pid, engine.returncode)
    return engine.wait() if code != CANNOT_START else CANNOT_START


def die_with_parent() -> Callable[[], None]:
    """Return a function for `preexec_fn` that has the child killed when this process ends."""
    prctl = ctypes.CDLL(None).prctl  # before the fork
    parent = os.getpid()

    def prepare() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _kill_stuck(engine: subprocess.Popen[bytes], seconds: float) -> None:
    _log.error("the engine (pid %d) made no turn for %g s: it is ended", engine.pid, seconds)
    engine.send_signal(signal.SIGUSR1)  # writes its stacks to the log, if it still can
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.wait(_SAY_S)
    engine.kill()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _clean(runtime: Runtime) -> None:
    """Remove the runtime directory of a server that has ended, if it was created by a bridge."""
    if runtime.directory.name.startswith(f"slipstream-{os.getuid()}-"):
        shutil.rmtree(runtime.directory, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the supervisor; return its exit code."""
    parser = argparse.ArgumentParser(prog="slipstream.launch", description=__doc__)
    parser.add_argument("--runtime", type=Path, required=True, help="the runtime directory")
    parser.add_argument("--folder", default="", help="the engine's within the runtime directory")
    parser.add_argument("--server", type=int, required=True, help="the tritonserver's process id")
    parser.add_argument("--lock", type=int, required=True, help="descriptor of the lock, taken")
    options = parser.parse_args(arguments)
    os.set_inheritable(options.lock, False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s launch %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    # The engine ignores it too. When the model's process that started this one dies, the process
    # group is orphaned, and the kernel sends it SIGHUP if the engine is stopped.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    runtime = Runtime(options.runtime, options.folder)
    try:
        supervisor = Supervisor(runtime, options.lock, options.server)
    except ProcessLookupError:
        _clean(runtime)
        return 0
    code = supervisor.run()
    if code == 0:
        with contextlib.suppress(OSError):
            _clean(runtime)
    return code


if __name__ == "__main__":
    sys.exit(main())
