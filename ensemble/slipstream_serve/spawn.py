"""How a tritonserver's process begins: stacks, signals, whom it waits for, whose end is its own."""

import contextlib
import ctypes
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from slipstream_runtime.waking import gentle_children

_STACK_BYTES = 1 << 30  # of each thread of the server; what is not used costs nothing
_SET_PARENT_DEATH_SIGNAL = 1


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    working: Path,
    log: BinaryIO,
    blocked: set[signal.Signals],
) -> subprocess.Popen[bytes]:
    """Start it in the directory `working`, with these signals blocked. Raises OSError.

    It is told to end when the thread that calls this ends.
    """
    stack = _stack_limits()
    prctl = ctypes.CDLL(None).prctl  # looked up here: the forked child does as little as it can

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
            # Ctrl-C is ours: the stubs must not see it. But our death is the server's. No session
            # of its own: Linux would share the cores among sessions first (sched_autogroup), and
            # who wakes on a core where another's engine computes waits there for up to 80 ms.
            process_group=0,
            preexec_fn=prepare,
        )


def _stack_limits() -> tuple[int, int]:
    """Of the server. Before Triton 25.07 a body of HTTP takes as much of a thread's stack as it is
    long: with the usual 8 MiB, one of 8 MB ends the whole server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    unlimited = resource.RLIM_INFINITY
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return soft, hard  # there, what is never touched counts too
    wanted = _STACK_BYTES if hard == unlimited else min(_STACK_BYTES, hard)
    return (soft if soft != unlimited and soft > wanted else wanted), hard
