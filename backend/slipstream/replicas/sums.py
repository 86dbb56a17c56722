"""Sums over replicas: of loads, of statuses, and of metrics, which never fall when one restarts."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
from slipstream_contract.errors import ContractError
from slipstream_runtime.admission import UNKNOWN, Load

from slipstream import wire
from slipstream.core.laps import process_age
from slipstream.figures import GAUGES
from slipstream.replicas.replica import Replica

_log = logging.getLogger(__name__)
_PERIOD_S = 1.0
_ANSWER_S = 1.0
_MAX_SAMPLES = 10_000  # that nobody takes
_SAME = ("block_size", "start_time_s", "gpu_hour_price")  # of gauges: no sums, and they stay


def sum_loads(loads: Sequence[Load]) -> Load:
    """Return the load of all replicas together; rates of admission add up."""
    up = [load for load in loads if load.max_requests]
    if not up:
        return Load(0, 0, 0, 1, 1)
    return Load(
        sum(load.num_requests for load in up),
        sum(load.num_tokens for load in up),
        sum(load.num_running for load in up),
        sum(load.max_requests for load in up),
        sum(load.max_tokens for load in up),
        ms_per_request=_together([load.ms_per_request for load in up]),
        ms_per_token=_together([load.ms_per_token for load in up]),
        looked_ns=min(load.looked_ns for load in up),
    )


def _together(ms_each: Sequence[float]) -> float:
    """Return the time of one where several work beside each other."""
    known = [each for each in ms_each if each not in (UNKNOWN, 0.0)]
    if not known:
        return UNKNOWN
    return 1.0 / sum(1.0 / each for each in known)


def sum_statuses(statuses: Sequence[wire.Status]) -> wire.Status:
    """Return the status of all replicas together; the longest step of them counts."""
    if not statuses:
        return wire.Status(0, "", 0, 0, 0, 0, 0, 0.0, 0, 0, [])
    summed = (
        *("kv_blocks_free", "kv_blocks_total", "running", "waiting", "num_steps"),
        *("num_preemptions", "num_prompt_tokens", "num_output_tokens"),
        *("num_prefix_queries", "num_prefix_hits"),
    )
    return msgspec.structs.replace(
        statuses[0],
        **{name: sum(getattr(each, name) for each in statuses) for name in summed},
        last_step_age_s=max(each.last_step_age_s for each in statuses),
        running_adapters=sorted({name for each in statuses for name in each.running_adapters}),
        waiting_adapters=sorted({name for each in statuses for name in each.waiting_adapters}),
        requests=None,
        figures=None,
    )


class ReplicaTotals:
    """What one replica's engines have counted since the router began, one after the other.

    An engine that began before is one that an earlier router had: what it had counted when it was
    first seen is not counted again. `is_older` says so of a process.
    """

    def __init__(self, is_older: Callable[[int], bool]) -> None:
        self.figures: wire.Figures | None = None  # of all, but gauges and samples of the last
        self._is_older = is_older
        self._pid = 0
        self._found: wire.Figures | None = None  # what the engine had counted before
        self._before: wire.Figures | None = None  # of engines that have ended

    def known(self, engine_pid: int) -> wire.Figures | None:
        """Return the figures, with gauges if they are of the engine that there is."""
        if self.figures is None or self._pid == engine_pid:
            return self.figures
        gauges = {name: value for name, value in self.figures.gauges.items() if name in _SAME}
        return msgspec.structs.replace(self.figures, gauges=gauges)

    def take(self, status: wire.Status) -> None:
        """Take the figures of an engine."""
        assert status.figures is not None
        now = status.figures
        if status.engine_pid != self._pid:
            self._pid, self._before = status.engine_pid, self.figures
            self._found = now if self._is_older(status.engine_pid) else None
        if self._found is not None:
            now = _less(now, self._found)
        old = self._before
        self.figures = now if old is None else sum_figures([now, _counts(old)])


def _is_older(pid: int) -> bool:
    """Return whether a process of this machine began before this one."""
    return process_age(pid) > process_age()


def _counts(figures: wire.Figures) -> wire.Figures:
    """Return figures without what holds only while an engine runs."""
    return wire.Figures({}, figures.counters, figures.histograms, {})


def _less(figures: wire.Figures, found: wire.Figures) -> wire.Figures:
    """Return figures without what had been counted before."""
    counters = {name: n - found.counters.get(name, 0.0) for name, n in figures.counters.items()}
    histograms = dict[str, tuple[list[int], float]]()
    for name, (cells, total) in figures.histograms.items():
        before, before_total = found.histograms.get(name, ([0] * len(cells), 0.0))
        left = [one - other for one, other in zip(cells, before, strict=True)]
        histograms[name] = left, total - before_total
    return wire.Figures(figures.gauges, counters, histograms, figures.samples)


def sum_figures(all_figures: Sequence[wire.Figures]) -> wire.Figures:
    """Return figures summed by name; of what is the same everywhere, those of the first."""
    gauges: dict[str, float] = defaultdict(float)
    counters: dict[str, float] = defaultdict(float)
    histograms: dict[str, tuple[list[int], float]] = {}
    samples: dict[str, list[float]] = defaultdict(list)
    for figures in all_figures:
        for name, value in figures.gauges.items():
            is_first = name not in gauges
            if is_first or name not in _SAME:
                gauges[name] += value
        for name, value in figures.counters.items():
            counters[name] += value
        for name, (cells, total) in figures.histograms.items():
            before, before_total = histograms.get(name, ([0] * len(cells), 0.0))
            added = [one + other for one, other in zip(before, cells, strict=True)]
            histograms[name] = added, before_total + total
        for name, values in figures.samples.items():
            samples[name] += values
    return wire.Figures(dict(gauges), dict(counters), histograms, dict(samples))


class Gatherer:
    """A thread that asks all replicas for their figures once a second.

    Sums begin at 0 with the router, which began at `since_s`. So a bridge, which adds up the counts
    of one engine after the other, can take each router for an engine.
    """

    def __init__(self, replicas: Sequence[Replica], since_s: float) -> None:
        assert set(_SAME) <= set(GAUGES)
        self._replicas, self._since_s = replicas, since_s
        self._totals = {each.number: ReplicaTotals(_is_older) for each in replicas}
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="figures", daemon=True)
        self._thread.start()

    def take(self, num_dropped: int) -> wire.Figures:
        """Return the sums as of the last look; samples once. Gauges are of engines that are up."""
        pids = {each.number: each.engine_pid for each in self._replicas}
        with self._lock:
            found = [each.known(pids[number]) for number, each in self._totals.items()]
            known = [each for each in found if each is not None]
            figures = sum_figures(known)
            samples, self._samples = dict(self._samples), defaultdict(list)
        figures.counters["dropped_messages"] = (
            figures.counters.get("dropped_messages", 0.0) + num_dropped
        )
        gauges = figures.gauges | ({"start_time_s": self._since_s} if known else {})
        return msgspec.structs.replace(figures, gauges=gauges, samples=samples)

    def close(self) -> None:
        """End the thread."""
        self._is_closing.set()
        self._thread.join()

    def look(self) -> None:
        """Ask all replicas that are up."""
        for replica in self._replicas:
            try:
                status = replica.connection.request_status(_ANSWER_S, with_figures=True)
            except ContractError:
                continue
            if status.figures is None:
                continue
            with self._lock:
                self._totals[replica.number].take(status)
                for name, values in status.figures.samples.items():
                    self._samples[name] = (self._samples[name] + values)[-_MAX_SAMPLES:]

    def _run(self) -> None:
        while not self._is_closing.wait(_PERIOD_S):
            try:
                self.look()
            except Exception:
                _log.exception("figures of replicas could not be summed")
