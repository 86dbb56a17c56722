"""What the kernel says of another process, and how many there are of a model."""

import hashlib
import os
from pathlib import Path

MAX_INSTANCES = 8  # of one model; files that they share have a place for each
_GROUP, _BEGAN = 5 - 3, 22 - 3  # proc(5) counts from 1, and `_fields` begin with the third
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    return _state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether it was told to stop (SIGSTOP) and not yet to go on. A debugger's stop is none."""
    return _state(pid) == "T"


def in_group(leader: int) -> list[int]:
    """The processes of a group: all that its leader started and that began none of their own.

    A process has no environment and no command to be known by while it executes another program.
    """
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _group(pid) == leader]


def identity(pid: int) -> str:
    """A name for the process that no other ever gets. Raises OSError if there is none.

    Numbers come again: in a container that is started again a process may well get its old one.
    """
    born = f"{_fields(pid)[_BEGAN]} {_BOOT.read_text()}"  # in ticks since the machine's last start
    return f"{pid}-{hashlib.blake2s(born.encode(), digest_size=4).hexdigest()}"


def _state(pid: int) -> str:
    """One letter, as `ps` shows it; X for a process that does not exist."""
    try:
        return _fields(pid)[0]
    except OSError:
        return "X"


def _group(pid: int) -> int:
    """0 for a process that has ended or does not exist."""
    try:
        fields = _fields(pid)
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[_GROUP])


def _fields(pid: int) -> list[str]:
    """What `/proc/PID/stat` has behind the name, from field 3 on. Raises OSError."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()
