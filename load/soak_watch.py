"""What the processes of a server hold: threads, file descriptors, memory, shared memory."""

import contextlib
import os
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from slipstream_serve.triton import SHARED_MEMORY, TritonServer

_METRIC = re.compile(r"^slipstream_(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

# gRPC adds threads to its pool when it likes, 5 in half an hour, each with its eventfd. A 24.10
# keeps the socket of a connection that broke just as an answer on it ended by itself: one of 298
# that broke at 10 ms a token, 24 of 316 at 1 ms. One lost by every cancel would be thousands.
_SLACK = {("tritonserver", count): 16 for count in ("threads", "eventfd", "socket")}
# So long processes take memory that they use again and again, and so long what comes and goes looks
# like growth: ten minutes, or as many requests as two cores serve in them.
_LONG_S = 600.0
_LONG_REQUESTS = 20_000


@dataclass
class Process:
    """Figures of one process; memory is what is resident, but for pages of files: those come and go
    with what else the machine does.
    """

    threads: int = 0
    fds: Counter[str] = field(default_factory=Counter)  # by kind: file, socket, eventfd, ...
    rss_mib: float = 0.0


@dataclass
class Held:
    """Figures of a server at one moment."""

    processes: dict[str, Process] = field(default_factory=dict)
    shm_files: int = 0
    shm_mib: float = 0.0


def held(server: TritonServer, engine_pid: int) -> Held:
    """What a server holds now; a process is named after its model or its part."""
    stubs = server.stubs()
    result = Held()
    for pid in server.processes():
        name = stubs.get(pid, "").removesuffix("_0_0") or "supervisor"
        name = {server.pid: "tritonserver", engine_pid: "engine"}.get(pid, name)
        with contextlib.suppress(OSError):  # one that has just ended
            _add(result.processes.setdefault(name, Process()), Path(f"/proc/{pid}"))
    for region in SHARED_MEMORY.glob(f"{server._prefix}*"):
        with contextlib.suppress(OSError):
            result.shm_mib += region.stat().st_blocks * 512 / 2**20
            result.shm_files += 1
    return result


def _add(process: Process, folder: Path) -> None:
    status = (folder / "status").read_text()
    process.threads += int(_field(status, "Threads"))
    for fd in os.listdir(folder / "fd"):
        with contextlib.suppress(OSError):  # it has just been closed
            process.fds[_kind(os.readlink(folder / "fd" / fd))] += 1
    process.rss_mib += int(_field(status, "RssAnon")) / 1024


def _kind(target: str) -> str:
    """What a link in /proc/PID/fd is: `socket:[1]`, `anon_inode:[eventfd]`, or a path."""
    found = re.match(r"anon_inode:\[?(\w+)|(\w+):\[", target)
    return found[1] or found[2] if found else "file"


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    return found[1] if found else "0"


def growth(before: Held, after: Held) -> list[str]:
    """One line for each count that grew, and for each process that is gone or new.

    Memory is not judged: allocators keep what they once had.
    """
    lines = []
    for name in sorted(before.processes.keys() | after.processes.keys()):
        if name not in before.processes or name not in after.processes:
            lines.append(f"{name}: {'ended' if name in before.processes else 'new'}")
            continue
        old, new = (each.processes[name] for each in (before, after))
        counts = {"threads": (old.threads, new.threads)}
        counts |= {kind: (old.fds[kind], new.fds[kind]) for kind in sorted(new.fds)}
        for count, (had, has) in counts.items():
            if has > had + _SLACK.get((name, count), 0):
                lines.append(f"{name}: {count} {had} -> {has}")
    if after.shm_files > before.shm_files:
        lines.append(f"/dev/shm: files {before.shm_files} -> {after.shm_files}")
    if after.shm_mib > before.shm_mib:
        lines.append(f"/dev/shm: MiB {before.shm_mib:.1f} -> {after.shm_mib:.1f}")
    return lines


def table(before: Held, after: Held) -> str:
    """Both in columns."""
    lines = [f"{'process':<18}{'threads':>14}{'fds':>14}{'RSS MiB':>18}"]
    none = Process()
    for name in sorted(before.processes.keys() | after.processes.keys()):
        old, new = before.processes.get(name, none), after.processes.get(name, none)
        threads, fds = f"{old.threads} -> {new.threads}", f"{old.fds.total()} -> {new.fds.total()}"
        rss = f"{old.rss_mib:.0f} -> {new.rss_mib:.0f}"
        lines.append(f"{name:<18}{threads:>14}{fds:>14}{rss:>18}")
    files, size = (
        f"{before.shm_files} -> {after.shm_files}",
        f"{before.shm_mib:.1f} -> {after.shm_mib:.1f}",
    )
    lines.append(f"{'/dev/shm':<18}{'files':>14}{files:>14}{size:>18}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Slope:
    """How resident memory grows."""

    mib_h: float
    kib_request: float


_Sample = tuple[float, int, dict[str, float]]  # time, requests, MiB of each process


def _is_long(begin: _Sample, end: _Sample) -> bool:
    return end[0] - begin[0] >= _LONG_S or end[1] - begin[1] >= _LONG_REQUESTS


def _warmed_up(samples: list[_Sample]) -> list[_Sample]:
    if not samples:
        return []
    first, last = samples[0], samples[-1]
    third_s = first[0] + (last[0] - first[0]) / 3
    kept = [sample for sample in samples if sample[0] >= third_s and _is_long(first, sample)]
    return kept if kept and _is_long(kept[0], last) else []


class Memory:
    """Resident memory of the processes of one server after the other."""

    def __init__(self) -> None:
        self._servers: list[list[_Sample]] = []

    def begin_server(self) -> None:
        """What follows is another server's."""
        self._servers.append([])

    def add(self, now_s: float, num_requests: int, state: Held) -> None:
        """A sample, after so many requests."""
        sizes = {name: process.rss_mib for name, process in state.processes.items()}
        self._servers[-1].append((now_s, num_requests, sizes))

    def slopes(self) -> dict[str, Slope]:
        """Fit for each process one line through all servers' samples, each with its own beginning.

        The first third of each server's time, and at least ten minutes or 20,000 requests, are its
        warm-up and do not count. Of a process that no server kept as long again nothing is said.
        """
        found = {}
        kept = [_warmed_up(samples) for samples in self._servers]
        for name in sorted({name for samples in kept for _, _, sizes in samples for name in sizes}):
            sums = [0.0] * 4
            for samples in kept:
                rows = [(t, float(n), sizes[name]) for t, n, sizes in samples if name in sizes]
                if not rows:
                    continue
                means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
                for t, n, size in rows:
                    t, n, size = t - means[0], n - means[1], size - means[2]
                    sums = [
                        a + b for a, b in zip(sums, (t * size, t * t, n * size, n * n), strict=True)
                    ]
            if sums[1] and sums[3]:
                found[name] = Slope(3600 * sums[0] / sums[1], 1024 * sums[2] / sums[3])
        return found


def metric(url: str, name: str) -> float:
    """A figure of the server's metrics; 0 where it is not told."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        text = reply.read().decode()
    return sum(float(value) for key, value in _METRIC.findall(text) if name in key)
