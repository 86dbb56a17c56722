"""A client process, `python -m slipstream_client.bench.worker`: plans in by stdin, records out.

While requests run it only records times and counts; figures are computed later.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator

from slipstream_client.bench.messages import (
    Done,
    Job,
    Progress,
    Ready,
    Record,
    Start,
    WorkerPlan,
    read,
    write,
)
from slipstream_client.bench.openai_transport import OpenAITransport
from slipstream_client.bench.protocols import HTTP, OPENAI
from slipstream_client.bench.transports import (
    GrpcTransport,
    HttpTransport,
    Transport,
    retry_after_s,
)

_PROGRESS_S = 0.25
_PROBE_S = 0.05
_SHORT_S = 0.5  # a shorter run cannot measure the share of a core
_GC_THRESHOLD = 100_000  # objects: a garbage collection would delay the timestamps
_DEFAULT_PAUSE_S = 1.0  # for a refusal without retry_after_ms


class Run:
    """A run of a plan, in an event loop."""

    def __init__(self, plan: WorkerPlan, sender: Transport) -> None:
        self._plan = plan
        self._sender = sender
        self._records: list[Record] = []
        self._num_started = 0
        self._num_refused = 0
        self._num_failed = 0
        self._late_ms: list[float] = []
        self._peak_cpu = 0.0

    async def warm_up(self) -> list[Record]:
        """Send the warm-up requests and return their records, which no figure counts."""
        now_ns = time.monotonic_ns()
        records = [Record(-1, now_ns, now_ns) for _ in self._plan.warm_up]
        pairs = zip(self._plan.warm_up, records, strict=True)
        await asyncio.gather(*(self._sender.send(payload, record) for payload, record in pairs))
        return records

    async def run(self, go: Start) -> Done:
        """Send all requests and wait until the last one ends."""
        await asyncio.sleep((go.begin_ns - time.monotonic_ns()) / 1e9)
        begin_s, cpu_s, loop_s = time.monotonic(), time.process_time(), time.thread_time()
        watchers = [asyncio.create_task(self._probe()), asyncio.create_task(self._report())]
        if self._plan.num_users:
            jobs = self._jobs()
            users = [self._user(jobs, go.end_ns) for _ in range(self._plan.num_users)]
            await asyncio.gather(*users)
        else:
            await self._send_when_due(go)
        for watcher in watchers:
            watcher.cancel()
        wall_s = max(1e-9, time.monotonic() - begin_s)
        cpu_s = time.process_time() - cpu_s
        mean = (time.thread_time() - loop_s) / wall_s if wall_s >= _SHORT_S else 0.0
        peak = max(self._peak_cpu, mean)
        return Done(self._records, cpu_s, wall_s, peak, self._late_ms)

    def _jobs(self) -> Iterator[Job]:
        yield from self._plan.jobs
        while self._plan.is_repeated and self._plan.jobs:
            yield from self._plan.jobs

    async def _user(self, jobs: Iterator[Job], end_ns: int) -> None:
        """Send one request after another until `end_ns`."""
        for job in jobs:
            now_ns = time.monotonic_ns()
            if now_ns >= end_ns:
                return
            await self._request(job, now_ns)

    async def _send_when_due(self, go: Start) -> None:
        """Send every request at its due time, whether or not earlier ones have ended."""
        tasks = []
        for job in self._plan.jobs:
            due_ns = go.begin_ns + job.offset_ns
            pause_ns = due_ns - time.monotonic_ns()
            if pause_ns > 0:
                await asyncio.sleep(pause_ns / 1e9)
            tasks.append(asyncio.create_task(self._request(job, due_ns)))
        await asyncio.gather(*tasks)

    async def _request(self, job: Job, intended_ns: int) -> None:
        record = Record(job.index, intended_ns, intended_ns)
        self._num_started += 1
        while True:
            record.sent_ns = time.monotonic_ns()
            await self._sender.send(job.payload, record)
            if not record.is_refused or record.num_tries > self._plan.num_retries:
                break
            pause_s = retry_after_s(record.message)
            await asyncio.sleep(_DEFAULT_PAUSE_S if pause_s is None else pause_s)
            record.num_tries += 1
            record.code, record.message, record.is_refused = "", "", False
        self._records.append(record)
        self._num_refused += record.is_refused
        self._num_failed += bool(record.code) and not record.is_refused

    async def _probe(self) -> None:
        """Measure how late the loop wakes up: recorded times may be late by as much."""
        cpu_s, since_s = time.thread_time(), time.monotonic()
        while True:
            due_s = time.monotonic() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            now_s = time.monotonic()
            self._late_ms.append((now_s - due_s) * 1e3)
            if now_s - since_s >= 1:
                used_s = time.thread_time()
                self._peak_cpu = max(self._peak_cpu, (used_s - cpu_s) / (now_s - since_s))
                cpu_s, since_s = used_s, now_s

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            ended = len(self._records)
            running = self._num_started - ended
            progress = Progress(ended, running, self._num_refused, self._num_failed)
            write(sys.stdout.buffer, progress)


@contextlib.asynccontextmanager
async def transport(
    protocol: str, address: str, model: str, timeout_s: float
) -> AsyncIterator[Transport]:
    """Open the transport of a protocol, one of `protocols.PROTOCOLS`; close it at the end."""
    found: Transport
    if protocol == OPENAI:
        found = OpenAITransport(address, timeout_s)
    elif protocol == HTTP:
        found = HttpTransport(address, f"/v2/models/{model}/generate_stream", timeout_s)
    else:
        found = GrpcTransport(address, timeout_s)
    try:
        yield found
    finally:
        await found.close()


async def _serve(plan: WorkerPlan) -> None:
    """Run one plan: warm up, wait for `Start`, write `Done`."""
    async with transport(plan.protocol, plan.address, plan.model, plan.timeout_s) as sender:
        run = Run(plan, sender)
        write(sys.stdout.buffer, Ready(await run.warm_up()))
        go = read(sys.stdin.buffer)
        if not isinstance(go, Start):
            return
        # The command sends nothing during a run: readable now means that it has died.
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), os._exit, 1)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        done = await run.run(go)
        loop.remove_reader(sys.stdin.fileno())
        write(sys.stdout.buffer, done)


def main() -> int:
    """Run plans until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C
    with contextlib.suppress(BrokenPipeError):
        while isinstance(plan := read(sys.stdin.buffer), WorkerPlan):
            asyncio.run(_serve(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
