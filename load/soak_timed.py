"""A soak by time: 80 % of what the server can do, a fifth leaves early, a canary every second."""

import asyncio
import contextlib
import itertools
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from slipstream_client import AsyncSlipstreamClient
from slipstream_serve.triton import TritonServer
from soak_plan import CHILD_STREAMS, MODELS, Ask, Child, Question, draw
from soak_storm import MAX_STREAMS, Books, ServerLostError, Storm, Took
from soak_watch import Memory, growth, held

SHARE = 0.8  # of the peak
TURN_S = 300.0  # then the peak is measured anew: a machine that others share may become slower
CANCELS = 0.2
CANARY_S = 1.0
SAMPLE_S = 5.0
MAX_IN_FLIGHT = 8 * MAX_STREAMS  # more: the server does not keep up with 80 % of its own peak
MAX_BEHIND = 3  # times that this may be, each followed by another measurement
# What a run may cost; the reasons are in docs/clients.md.
MAX_SLOWER = 2.0  # p99 of the last tenth over the first; the first peak over the last
MAX_SLOPE_MIB_H = 60.0  # of each of our processes, which grows if it does by both of these
MAX_SLOPE_KIB = 0.5  # a request
MAX_SERVER_KIB = 16.0  # of tritonserver itself, a request
_PLAN = 1000  # requests drawn at once
_SETTLE_S = 15.0
_NAP_S = 0.05
_PEAK_S = 10.0  # of one measurement, at most
_NUM_PEAKS = 3  # at first, and of the last ones the median, or a lower last one


class Timed:
    """One run, over as many servers as it takes."""

    def __init__(self, books: Books, seconds: float, seed: int) -> None:
        self.books = books
        self.memory = Memory()
        self.num_asked = 0
        self.num_again = 0  # asked of a server that then crashed
        self.num_canaries = self.num_canaries_wrong = 0
        self.peaks: list[float] = []  # requests a second
        self.offered: list[float] = []  # likewise, of each turn
        self.grown: list[str] = []
        self._seed = seed
        self._seconds = seconds
        self._peak_s = min(_PEAK_S, seconds / 10)
        self._run_s = 0.0  # of load, over all servers
        self._end_s = 0.0  # of this turn
        self._late_s = 0.0
        self._measured_s = float("-inf")  # when the last peak was
        self._num_behind = 0
        self._canaries = [Ask(Question(m == "tensorrt_llm", 0, "greedy"), m) for m in MODELS]

    async def sit(self, server: TritonServer) -> bool:
        """Load one server for what is left of the time, or until SIGINT; False if it was lost."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.stop)
        async with AsyncSlipstreamClient(server.endpoints.grpc) as client:
            storm = Storm(self.books, server, client)
            try:
                items = draw(_PLAN, 200, self._seed)
                asks = [item for item in items if isinstance(item, Ask)]
                await storm.learn([*asks, *self._canaries])
                await self._measure_peaks(storm)
                await asyncio.sleep(1.0)
                engine = (await client.health())["engine_pid"]
                before = held(server, engine)
                self.memory.begin_server()
                while await self._load(storm, server, engine):
                    await storm.drain()
                    if self._run_s >= self._seconds or self._num_behind > MAX_BEHIND:
                        break
                    await self._measure_peaks(storm)
                else:
                    return False
                deadline = time.monotonic() + _SETTLE_S
                while (grown := growth(before, held(server, engine))) and (
                    time.monotonic() < deadline
                ):
                    await asyncio.sleep(0.25)
                self.grown = grown
            except ServerLostError:
                return False
        return True

    def stop(self) -> None:
        """No more requests; the accounts are of those made so far."""
        self._seconds, self._end_s = 0.0, time.monotonic()

    async def _measure_peaks(self, storm: Storm) -> None:
        """Where the last one is too old."""
        if time.monotonic() - self._measured_s >= TURN_S:
            for _ in range(1 if self.peaks else _NUM_PEAKS):
                await self._measure_peak(storm)
            self._measured_s = time.monotonic()

    async def _measure_peak(self, storm: Storm) -> None:
        """Requests a second, MAX_STREAMS at once, that leave as often; no account has them.

        A machine with little time to spare may take longer, until one of them has ended.
        """
        num_took, ends = len(self.books.took), self.books.ends.copy()
        endless = self._endless()
        first = next(endless)  # drawn before the time begins
        begin_s = time.monotonic()
        end_s = begin_s + self._peak_s
        more = itertools.takewhile(lambda _: time.monotonic() < end_s, endless)
        task = asyncio.create_task(storm.run(itertools.chain([first], more)))
        await asyncio.sleep(self._peak_s)
        while self.books.ends == ends and not task.done():
            await asyncio.sleep(_NAP_S)
        num_done, took_s = self.books.ends.total() - ends.total(), time.monotonic() - begin_s
        if await task:
            raise ServerLostError
        await storm.drain()
        del self.books.took[num_took:]
        self.books.ends = ends
        self.peaks.append(num_done / took_s)
        print(f"soak: peak {self.peaks[-1]:.1f} requests/s", file=sys.stderr)

    def offer(self) -> float:
        """Requests a second of the next turn.

        Never more than before, or who is asked more would seem to become slower; and less where the
        peak is lower at once, since more than there is would be an overload.
        """
        peak = min(statistics.median(self.peaks[-_NUM_PEAKS:]), self.peaks[-1])
        self.offered.append(min([SHARE * peak, *self.offered[-1:]]))
        return self.offered[-1]

    def _items(self) -> list[Ask | Child]:
        self._seed += 1
        return draw(_PLAN, int(_PLAN * CANCELS), self._seed)

    def _endless(self) -> Iterator[Ask | Child]:
        while True:
            yield from self._items()

    async def _load(self, storm: Storm, server: TritonServer, engine: int) -> bool:
        """Requests at random times, the canary and the samples; False if the server was lost."""
        rng = random.Random(self._seed)
        rate = self.offer()
        begin = time.monotonic()
        self._end_s = begin + min(TURN_S, self._seconds - self._run_s)
        tasks: set[asyncio.Task[None]] = set()
        lost = asyncio.Event()

        async def one(item: Ask | Child) -> None:
            try:
                await storm.make(item)
            except ServerLostError:
                self.num_again += CHILD_STREAMS if isinstance(item, Child) else 1
                lost.set()

        others = [
            asyncio.create_task(self._sing(storm, lost)),
            asyncio.create_task(self._sample(server, engine, lost)),
            asyncio.create_task(self._note_lateness(lost)),
        ]
        next_s, is_behind = begin, False
        for item in self._endless():
            num = CHILD_STREAMS if isinstance(item, Child) else 1
            next_s += sum(rng.expovariate(rate) for _ in range(num))
            with contextlib.suppress(TimeoutError):
                until_s = min(next_s, self._end_s)
                await asyncio.wait_for(lost.wait(), max(0.0, until_s - time.monotonic()))
            if lost.is_set() or time.monotonic() >= self._end_s:
                break
            if is_behind := len(tasks) >= MAX_IN_FLIGHT:
                self._end_s = time.monotonic()
                break
            self.num_asked += num
            task = asyncio.create_task(one(item))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks, *others)
        self._run_s += time.monotonic() - begin
        if is_behind and not lost.is_set():  # or it was because it ended
            self._num_behind += 1
            self._measured_s = float("-inf")
        return not lost.is_set()

    async def _sing(self, storm: Storm, lost: asyncio.Event) -> None:
        """The canary: a greedy request of each model in turn, whose answer is known."""
        for ask in itertools.cycle(self._canaries):
            if lost.is_set() or time.monotonic() >= self._end_s:
                return
            begin = time.monotonic()
            try:
                is_right = await storm.make(ask)
            except ServerLostError:
                lost.set()
                return
            self.num_canaries += 1
            self.num_canaries_wrong += not is_right
            await asyncio.sleep(max(0.0, begin + CANARY_S - time.monotonic()))

    async def _sample(self, server: TritonServer, engine: int, lost: asyncio.Event) -> None:
        while not lost.is_set() and time.monotonic() < self._end_s:
            self.memory.add(time.monotonic(), self.num_asked, held(server, engine))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), SAMPLE_S)

    async def _note_lateness(self, lost: asyncio.Event) -> None:
        """How late this process itself can be: no fault of the server's."""
        while not lost.is_set() and (now_s := time.monotonic()) < self._end_s:
            await asyncio.sleep(_NAP_S)
            self._late_s = max(self._late_s, time.monotonic() - now_s - _NAP_S)

    # --- the result ----------------------------------------------------------------------------

    def result(self, crashes: list[str]) -> dict[str, Any]:
        """Figures, the table, and what is wrong."""
        books = self.books
        tenths = tenth_figures(books.took)
        first_and_last = {name: (p99s[0], p99s[-1]) for name, p99s in tenths.items()}
        slopes = self.memory.slopes()
        problems = [*books.problems, *self.grown]
        for name, (first, last) in first_and_last.items():
            if last > MAX_SLOWER * first:
                problems.append(f"{name}: {first:.0f} ms in the first tenth, {last:.0f} at the end")
        if self._num_behind > MAX_BEHIND:
            problems.append(f"fell behind {self._num_behind} times: it cannot keep up")
        peaks = self.peaks or [0.0]
        first, last = (statistics.median(p) for p in (peaks[:_NUM_PEAKS], peaks[-_NUM_PEAKS:]))
        if MAX_SLOWER * last < first:
            problems.append(f"peak: {first:.1f} requests/s at first, {last:.1f} at the end")
        for name, slope in slopes.items():
            is_ours = name != "tritonserver"
            if is_ours and slope.mib_h > MAX_SLOPE_MIB_H and slope.kib_request > MAX_SLOPE_KIB:
                problems.append(f"{name} grows by {slope.mib_h:.0f} MiB/h")
        server = slopes.get("tritonserver")
        if server is not None and server.kib_request > MAX_SERVER_KIB:
            problems.append(f"tritonserver grows by {server.kib_request:.1f} KiB a request")
        rows = {
            "requests": f"{self.num_asked} in {self._run_s:.0f} s, {SHARE:.0%} of the peak",
            "offered": ", ".join(f"{rate:.1f}" for rate in self.offered) + " a second",
            "peaks": ", ".join(f"{peak:.1f}" for peak in self.peaks) + " a second",
            "fell behind": f"{self._num_behind} times",
            "left early": f"{sum(v for k, v in books.ends.items() if k != 'complete')}",
            "lost": str(books.num_lost),
            "hung": str(books.num_hung),
            "wrong": str(books.num_wrong),
            "leaked": "; ".join(self.grown) or "0",
            "canary": f"{self.num_canaries - self.num_canaries_wrong} of {self.num_canaries} equal",
            "this tool": f"late by {self._late_s:.2f} s at most",
            "crashes": f"{len(crashes)} of tritonserver itself, {self.num_again} requests in them",
        }
        if not slopes:
            rows["RSS"] = "no server lived long enough"
        for name, slope in slopes.items():
            rows[f"RSS {name}"] = (
                f"{slope.mib_h:+.1f} MiB/h, {slope.kib_request:+.2f} KiB a request"
            )
        for name, (first, last) in first_and_last.items():
            rows[f"p99 {name}"] = f"first tenth {first:.0f} ms, last tenth {last:.0f} ms"
        return {
            "minutes": round(self._run_s / 60, 2),
            "peaks": [round(peak, 2) for peak in self.peaks],
            "offered": [round(rate, 2) for rate in self.offered],
            "ends": dict(sorted(books.ends.items())),
            "rows": rows,
            "p99 of tenths": {name: [round(p, 1) for p in p99s] for name, p99s in tenths.items()},
            "crashes of tritonserver itself": crashes,
            "table": "\n".join(f"{name:<24}{value}" for name, value in rows.items()),
            "problems": problems,
        }


def tenth_figures(took: list[Took]) -> dict[str, list[float]]:
    """99th percentiles in ms of the requests begun in each tenth of the time: to the first token,
    and between tokens. Tenths without any are left out.
    """
    if not took:
        return {}
    begin, end = min(t.begin_s for t in took), max(t.begin_s for t in took)
    tenth = (end - begin) / 10 or 1.0
    parts: dict[str, list[list[float]]] = {
        name: [[] for _ in range(10)] for name in ("first token", "a token")
    }
    for t in took:
        number = min(9, int((t.begin_s - begin) / tenth))
        parts["first token"][number].append(t.first_s - t.begin_s)
        if t.num_tokens > 1:
            between = (t.last_s - t.first_s) / (t.num_tokens - 1)
            parts["a token"][number].append(between)
    return {
        name: [1e3 * percentile(values, 0.99) for values in tenths if values]
        for name, tenths in parts.items()
        if any(tenths)
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
