"""Start a tritonserver's process: its stacks, signals, scheduling, and the death of its parent."""

import contextlib
import ctypes
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from slipstream_runtime.waking import gentle_children

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STACK_BYTES = 1 << 30  # per thread of the server; unused memory costs nothing
_SET_PARENT_DEATH_SIGNAL = 1


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[signal.Signals]]:
    """Block the signals that end a server until the block is left; yield the old mask.

    Between fork and exec a process has no mark in its environment, and no cleanup would find it.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield {signal.Signals(number) for number in usual}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    working: Path,
    log: BinaryIO,
    blocked: set[signal.Signals],
) -> subprocess.Popen[bytes]:
    """Start the command in the directory `working`, with these signals blocked. Raises OSError.

    The process gets SIGTERM when the calling thread ends.
    """
    stack = _stack_limits()
    prctl = ctypes.CDLL(None).prctl  # looked up here: the forked child must do very little

    def prepare() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        resource.setrlimit(resource.RLIMIT_STACK, stack)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    with gentle_children():
        return subprocess.Popen(
            command,
            env=environment,
            cwd=working,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # This process alone handles Ctrl-C: the stubs must not get it. But our death must end
            # the server. It gets no session of its own: Linux would share the cores among sessions
            # first (sched_autogroup), and a thread that wakes on a core of another session's engine
            # would wait there for up to 80 ms.
            process_group=0,
            preexec_fn=prepare,
        )


def _stack_limits() -> tuple[int, int]:
    """Return soft and hard limit of the stack for the server's threads.

    Before Triton 25.07 a body over HTTP takes as much of a thread's stack as it is long: with the
    usual 8 MiB, a body of 8 MB crashes the server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    unlimited = resource.RLIM_INFINITY
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return soft, hard  # without overcommit, untouched memory counts too
    wanted = _STACK_BYTES if hard == unlimited else min(_STACK_BYTES, hard)
    return (soft if soft != unlimited and soft > wanted else wanted), hard
