"""What the kernel says of another process, and how many there are of a model."""

import os
from pathlib import Path

MAX_INSTANCES = 8  # of one model; files that they share have a place for each


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    return _state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether it was told to stop (SIGSTOP) and not yet to go on. A debugger's stop is none."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """One letter, as `ps` shows it; X for a process that does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]
