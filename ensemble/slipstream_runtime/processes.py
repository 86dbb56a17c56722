"""State, group and identity of other processes, from /proc; limits on processes of a model."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MAX_INSTANCES = 8  # processes of one model; their shared files have a place for each
_GROUP, _BEGAN = 5 - 3, 22 - 3  # proc(5) counts from 1, and `_fields` begin with the third
_WORK = (10 - 3, 12 - 3, 14 - 3, 15 - 3)  # minor and major faults, ticks of user and of system
_WAITS = re.compile(rb"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Spent(NamedTuple):
    """What a process has done.

    computed_s: processor time.
    moved: bytes that it has read and written, disks or not, and of the pages that it came to.
    stored: bytes of that which came from a disk, or went to one.
    """

    computed_s: float = 0.0
    moved: int = 0
    stored: int = 0


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a server: without SIGHUP under `nohup`, which ignores it."""
    ending = [signal.SIGTERM, signal.SIGINT]
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ending if is_ignored else [*ending, signal.SIGHUP]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End a child process that may have ended: SIGTERM, after `patience_s` SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended (a zombie has)."""
    return _state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP. Under a debugger it is not."""
    return _state(pid) == "T"


def work_of(pid: int) -> object | None:
    """Return what changes while a process works or waits for a disk; None: it has ended.

    That is the processor time that it has used, in ticks, and the pages that it came to.
    """
    try:
        fields = _fields(pid)
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return time.monotonic() if fields[0] == "D" else tuple(fields[at] for at in _WORK)


def threads_of(pid: int) -> list[int]:
    """Return the threads of a process, the first one, too; none: it has ended."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def progress_of(pid: int, threads: Iterable[int]) -> object:
    """Return what changes while one of these threads gets on.

    That is what each has used and come to, as for `work_of`, and how often it has waited. A thread
    that hangs in a call does nothing of that, whatever the call waits for.
    """
    done = []
    for thread in threads:
        try:
            fields = _fields(pid, thread)
            waits = _WAITS.search(Path(f"/proc/{pid}/task/{thread}/status").read_bytes())
        except OSError:  # it has ended
            continue
        done.append((thread, waits and waits[1], *(fields[at] for at in _WORK)))
    return done


def could_run(pid: int, threads: Iterable[int]) -> bool:
    """Return whether one of these threads runs or waits for a processor."""
    for thread in threads:
        with contextlib.suppress(OSError):
            if _fields(pid, thread)[0] == "R":
                return True
    return False


def descendants_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            for child in map(int, children.split()):
                found += [child, *descendants_of(child)]
    return found


def spent_by(pids: Iterable[int]) -> dict[int, Spent]:
    """Return what each of these processes has done so far; one that has ended is left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            minor, major, *ticks = (int(_fields(pid)[at]) for at in _WORK)
            moved, stored = minor * _PAGE, major * _PAGE
            with contextlib.suppress(OSError):  # it is of another user
                io = Path(f"/proc/{pid}/io").read_text().split()
                read, written, _, _, from_disk, to_disk, cancelled = map(int, io[1::2])
                moved += read + written
                stored += from_disk + to_disk - cancelled
            found[pid] = Spent(sum(ticks) / _TICKS, moved, stored)
    return found


def in_group(leader: int) -> list[int]:
    """Return the processes of a group: all that its leader started, unless they left the group.

    The group identifies them even during an exec, when a process has no environment or command.
    """
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _group(pid) == leader]


def identity(pid: int) -> str:
    """Return a name for the process that no other process ever gets. Raises OSError if it is gone.

    Process ids are reused: in a restarted container a process may well get its old one.
    """
    born = f"{_fields(pid)[_BEGAN]} {_BOOT.read_text()}"  # start time in ticks since boot
    return f"{pid}-{hashlib.blake2s(born.encode(), digest_size=4).hexdigest()}"


def _state(pid: int) -> str:
    """Return the state's letter, as `ps` shows it; X for a process that does not exist."""
    try:
        return _fields(pid)[0]
    except OSError:
        return "X"


def _group(pid: int) -> int:
    """Return the process group; 0 for a process that has ended or does not exist."""
    try:
        fields = _fields(pid)
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[_GROUP])


def _fields(pid: int, thread: int | None = None) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name, from field 3 on. Raises OSError.

    Of one thread, if it is given.
    """
    whose = f"{pid}" if thread is None else f"{pid}/task/{thread}"
    text = Path(f"/proc/{whose}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()
