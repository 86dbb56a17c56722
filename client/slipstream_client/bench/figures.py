"""Compute figures from the clients' records. Times in ms, rates a second; no network, no clock.

Latencies count the requests that were due within the window, whenever they ended: leaving out the
unfinished ones would leave out the slow ones. Rates count what arrived within the window.

- `ttft`, `e2e`: from the time at which a request was due, even if the client or a full queue
  delayed it: a stalled server cannot hide requests that were not sent meanwhile.
- `itl`, time per token: a response of k tokens that arrives t after the previous one counts as k
  tokens of t / k each. The tokens of a stream's first response do not count.
- `gap`: the time t between responses, which a reader sees.
- `tpot`: a request's mean time per token after its first response.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slipstream_contract.errors import ContractError, clip

from slipstream_client.bench.messages import Record

PERCENTILES = (50, 90, 95, 99)
QUANTILES = np.linspace(0, 100, 101)  # percentiles of the distributions that are plotted
OBJECTIVES = ("ttft", "itl", "e2e")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits of a good request in ms; `itl` limits its mean time per token."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Objectives":
        """Parse any of `ttft:200 itl:30 e2e:3000`. Raises ContractError."""
        limits = {}
        for word in words:
            name, _, text = word.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = 0.0
            if name not in OBJECTIVES or not 0 < limit < float("inf"):
                raise ContractError(
                    f"goodput has {clip(word)}, not one of {', '.join(OBJECTIVES)} with : and ms"
                )
            limits[name] = limit
        return cls(limits)


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's record with its times and counts as arrays."""

    record: Record
    times_ns: NDArray[np.int64]
    counts: NDArray[np.int32]

    @classmethod
    def of(cls, record: Record) -> "Trace":
        """Decode the arrays of a record."""
        times = np.frombuffer(record.times_ns, np.int64)
        return cls(record, times, np.frombuffer(record.counts, np.int32))

    @property
    def is_whole(self) -> bool:
        """Whether the request ended without an error and with tokens."""
        return not self.record.code and len(self.times_ns) > 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return float(self.times_ns[0] - self.record.intended_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        """Time to the last token."""
        return float(self.times_ns[-1] - self.record.intended_ns) / 1e6

    @property
    def gaps_ms(self) -> Floats:
        """Times between responses, float64 [responses - 1]."""
        return np.diff(self.times_ns).astype(np.float64) / 1e6

    @property
    def itl_ms(self) -> Floats:
        """Time of each token after the first response, float64 [tokens]."""
        return np.repeat(self.gaps_ms / self.counts[1:], self.counts[1:])

    @property
    def tpot_ms(self) -> float | None:
        """Mean of `itl_ms`; None if all tokens came in one response."""
        tokens = int(self.counts[1:].sum())
        return float(self.times_ns[-1] - self.times_ns[0]) / 1e6 / tokens if tokens else None

    def is_good(self, objectives: Objectives) -> bool:
        """Return whether the request is whole and meets every objective."""
        if not self.is_whole:
            return False
        found = {"ttft": self.ttft_ms, "itl": self.tpot_ms or 0.0, "e2e": self.e2e_ms}
        return all(found[name] <= limit for name, limit in objectives.limits.items())


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The time that counts, in ns of CLOCK_MONOTONIC; `end_ns` is excluded."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return (self.end_ns - self.begin_ns) / 1e9

    def contains(self, time_ns: int) -> bool:
        """Return whether the window contains the time."""
        return self.begin_ns <= time_ns < self.end_ns


def summary(values: Floats | Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles and maximum; empty if there are no values."""
    if not len(values):
        return {}
    array = np.asarray(values, np.float64)
    found = {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}
    rounded = {"mean": float(array.mean()), **found, "max": float(array.max())}
    return {name: round(value, 3) for name, value in rounded.items()}


def figures(
    records: Sequence[Record],
    window: MeasuredWindow,
    objectives: Objectives,
    price_per_hour: float | None,
) -> dict[str, Any]:
    """Compute all figures of one load."""
    traces = [Trace.of(record) for record in records]
    offered = [trace for trace in traces if window.contains(trace.record.intended_ns)]
    whole = [trace for trace in offered if trace.is_whole]
    refused = [trace.record for trace in offered if trace.record.is_refused]
    failed = [t.record for t in offered if not t.is_whole and not t.record.is_refused]
    ended = [t for t in traces if t.is_whole and window.contains(int(t.times_ns[-1]))]
    times, counts = _joined(traces)
    inside = (times >= window.begin_ns) & (times < window.end_ns)
    num_tokens, num_responses = int(counts[inside].sum()), int(inside.sum())
    good = [trace for trace in whole if trace.is_good(objectives)]
    result: dict[str, Any] = {
        "seconds": round(window.seconds, 6),
        "requests": len(offered),
        "completed": len(whole),
        "refused": len(refused),
        "failed": len(failed),
        "errors": dict(Counter(record.code or "EMPTY" for record in failed)),
        "first_error": next((record.message for record in failed if record.message), ""),
        "retries": sum(trace.record.num_tries - 1 for trace in offered),
        "requests_per_s": _rate(len(ended), window),
        "tokens_per_s": _rate(num_tokens, window),
        "responses_per_s": _rate(num_responses, window),
        "tokens_per_response": round(num_tokens / num_responses, 3) if num_responses else 0.0,
        "input_tokens": summary([t.record.num_input_tokens for t in whole]),
        "output_tokens": summary([int(t.counts.sum()) for t in whole]),
    }
    result |= _latencies(whole)
    result["refusal_ms"] = summary([(r.ended_ns - r.sent_ns) / 1e6 for r in refused])
    result["lag_ms"] = summary(_lags(offered))
    if objectives.limits:
        result["goodput"] = {
            "objectives_ms": objectives.limits,
            "good": len(good),
            "share": round(len(good) / len(offered), 4) if offered else 0.0,
            "requests_per_s": _rate(sum(t.is_good(objectives) for t in ended), window),
        }
    if price_per_hour is not None:
        result["cost"] = cost(price_per_hour, window, len(ended), num_tokens)
    return result


def cost(
    price_per_hour: float, window: MeasuredWindow, requests: int, tokens: int
) -> dict[str, float]:
    """Divide the price of the window by its requests and its tokens."""
    paid = price_per_hour * window.seconds / 3600
    found = {"price_per_hour": price_per_hour}
    if requests:
        found["per_request"] = paid / requests
    if tokens:
        found["per_million_output_tokens"] = paid / tokens * 1e6
    return found


def _latencies(whole: list[Trace]) -> dict[str, Any]:
    """Return summaries of all latencies, and the quantiles for the plots."""
    values: dict[str, Floats] = {
        "ttft": np.array([trace.ttft_ms for trace in whole]),
        "itl": _concatenated([trace.itl_ms for trace in whole]),
        "gap": _concatenated([trace.gaps_ms for trace in whole]),
        "tpot": np.array([t.tpot_ms for t in whole if t.tpot_ms is not None]),
        "e2e": np.array([trace.e2e_ms for trace in whole]),
    }
    found: dict[str, Any] = {f"{name}_ms": summary(array) for name, array in values.items()}
    median = found["tpot_ms"].get("p50", 0.0)
    found["tokens_per_s_per_user"] = round(1e3 / median, 3) if median else 0.0
    found["quantiles_ms"] = {
        name: [round(float(q), 3) for q in np.percentile(values[name], QUANTILES)]
        for name in ("ttft", "itl")
        if len(values[name])
    }
    return found


def _lags(traces: list[Trace]) -> list[float]:
    """Return how late, in ms, the tool itself sent the requests without retries."""
    return [
        (t.record.sent_ns - t.record.intended_ns) / 1e6 for t in traces if t.record.num_tries == 1
    ]


def _joined(traces: list[Trace]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    if not traces:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    times = np.concatenate([trace.times_ns for trace in traces])
    return times, np.concatenate([trace.counts for trace in traces])


def _concatenated(arrays: list[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _rate(count: int, window: MeasuredWindow) -> float:
    return round(count / window.seconds, 3) if window.seconds > 0 else 0.0
