"""Start the client processes and run one load after another on them."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slipstream_contract.errors import Code, ContractError

from slipstream_client.bench.figures import MeasuredWindow
from slipstream_client.bench.messages import (
    Done,
    Job,
    Message,
    Progress,
    Ready,
    Record,
    Start,
    WorkerPlan,
    read,
    write,
)

_LEAD_NS = 100_000_000  # between the last `Ready` and the first request
_NEVER_NS = 1 << 62
_END_S = 2.0
BUSY = 0.85  # CPU share of an event loop or the machine that may limit the figures
LATE_MS = 20.0  # p99 lateness of a process's wake-ups that may limit the figures


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server, and how requests reach it."""

    protocol: str
    address: str
    model: str
    timeout_s: float
    num_retries: int


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load: `num_users` with one request in flight each, or jobs sent at their offsets."""

    jobs: Sequence[Job]
    warm_up: Sequence[bytes]
    num_users: int
    seconds: float | None  # no request starts later; None: run all jobs
    ramp_s: float  # requests of these first seconds are not counted


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of a load, the time that counts, and the clients' own use of resources."""

    records: list[Record]
    window: MeasuredWindow
    clients: dict[str, Any]


class _Process:
    """A client process and a thread that reads its messages."""

    def __init__(self, number: int, said: "queue.Queue[tuple[int, Message | None]]") -> None:
        command = [sys.executable, "-P", "-m", "slipstream_client.bench.worker"]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._number = number
        self._said = said
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its stdout reports its death
            write(self._popen.stdin, message)

    def kill(self) -> None:
        """Kill the process: it has no state worth saving."""
        self._popen.kill()
        self._popen.wait(_END_S)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        while (message := read(self._popen.stdout)) is not None:
            self._said.put((self._number, message))
        self._said.put((self._number, None))


class Clients:
    """Client processes that live as long as the `with` block."""

    def __init__(self, num_processes: int) -> None:
        self._said: queue.Queue[tuple[int, Message | None]] = queue.Queue()
        self._processes = [_Process(number, self._said) for number in range(num_processes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def probe(self, target: Target, payload: bytes) -> Record:
        """Send one request and return its record. Raises ContractError if it fails."""
        self._processes[0].send(_plan(target, [], [payload], 0, False))
        _, ready = self._next()
        assert isinstance(ready, Ready)
        self._processes[0].send(Start(time.monotonic_ns(), 0))
        self._next()
        return _successful(ready.records)[0]

    def run(
        self, target: Target, load: LoadSpec, show: Callable[[Progress], None] = lambda _: None
    ) -> Outcome:
        """Run a load from its warm-up to the last response. Raises ContractError on failure."""
        count = len(self._processes)
        is_repeated = load.num_users > 0 and load.seconds is not None
        lanes = load.num_users or count  # jobs are dealt to users, or else to processes
        for number, process in enumerate(self._processes):
            own = range(number, lanes, count)
            jobs = [job for lane in own for job in load.jobs[lane::lanes]]
            jobs.sort(key=lambda job: job.index)
            users = len(own) if load.num_users else 0
            process.send(_plan(target, jobs, list(load.warm_up[number::count]), users, is_repeated))
        for _ in range(count):
            _, ready = self._next()
            assert isinstance(ready, Ready)
            _successful(ready.records)
        begin_ns = time.monotonic_ns() + _LEAD_NS
        end_ns = _NEVER_NS if load.seconds is None else begin_ns + round(load.seconds * 1e9)
        machine = _machine_cpu()
        for process in self._processes:
            process.send(Start(begin_ns, end_ns))
        done = list(self._until_done(show))
        busy = _share(machine, _machine_cpu())
        records = [record for each in done for record in each.records]
        if load.seconds is None:
            end_ns = max((record.ended_ns for record in records), default=begin_ns) + 1
        window = MeasuredWindow(begin_ns + round(load.ramp_s * 1e9), end_ns)
        return Outcome(records, window, _client_use(done, busy))

    def _until_done(self, show: Callable[[Progress], None]) -> Iterator[Done]:
        latest: dict[int, Progress] = {}
        num_running = len(self._processes)
        while num_running:
            number, message = self._next()
            if isinstance(message, Progress):
                latest[number] = message
                show(_sum(latest.values()))
            elif isinstance(message, Done):
                num_running -= 1
                refused = sum(record.is_refused for record in message.records)
                failed = sum(bool(record.code) for record in message.records) - refused
                latest[number] = Progress(len(message.records), 0, refused, failed)
                show(_sum(latest.values()))
                yield message

    def _next(self) -> tuple[int, Message]:
        number, message = self._said.get()
        if message is None:
            raise ContractError("a client process ended by itself", Code.INTERNAL)
        return number, message


def _plan(
    target: Target, jobs: list[Job], warm_up: list[bytes], num_users: int, is_repeated: bool
) -> WorkerPlan:
    return WorkerPlan(
        *(target.protocol, target.address, target.model, jobs, warm_up, num_users, is_repeated),
        *(target.timeout_s, target.num_retries),
    )


def _successful(records: list[Record]) -> list[Record]:
    """Return the records of requests that must not fail. Raises ContractError if one did."""
    for record in records:
        if record.code:
            code = Code(record.code) if record.code in Code.__members__ else Code.INTERNAL
            raise ContractError(f"the first request failed: {record.message or record.code}", code)
    return records


def _sum(parts: "Iterator[Progress] | Any") -> Progress:
    counts = [(p.ended, p.running, p.refused, p.failed) for p in parts]
    return Progress(*(sum(column) for column in zip(*counts, strict=True)))


def _client_use(done: list[Done], machine: float) -> dict[str, Any]:
    """Summarise the clients' use of resources; `limit` names what may have slowed the figures."""
    late = sorted(late for each in done for late in each.late_ms)
    peak = max(each.peak_cpu for each in done)
    late_ms = late[min(len(late) - 1, len(late) * 99 // 100)] if late else 0.0
    limit = ""
    if peak >= BUSY:
        limit = f"a client process was busy {peak:.0%} of a second: more --processes"
    elif late_ms >= LATE_MS:
        reason = "this machine had no core for it" if machine >= BUSY else "it did too much at once"
        limit = f"a client process woke {late_ms:.0f} ms late (p99): {reason}"
    return {
        "processes": len(done),
        "cores": round(sum(each.cpu_s for each in done) / max(each.wall_s for each in done), 3),
        "peak": round(peak, 3),
        "late_p99_ms": round(late_ms, 3),
        "machine": round(machine, 3),
        "limit": limit,
    }


def _machine_cpu() -> tuple[float, float]:
    """Return busy and total CPU time of this machine since boot, in clock ticks."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(word) for word in words]
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))


def _share(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / max(1.0, after[1] - before[1])


def default_processes() -> int:
    """Return half of the cores, from 1 to 16: the server often runs on the same machine."""
    return max(1, min(16, (os.cpu_count() or 1) // 2))
