"""Open loads: requests that come at moments of their own, whatever has been answered.

A trace is defined by its kind, its rate and its seed. Prompts are log-normal (median 300 tokens,
sigma 1.1, 4 to 4,000), outputs too (median 200, sigma 0.7, 2 to 800). Kinds:

- `poisson`: independent arrivals at the rate.
- `bursts`: the same rate, but every fourth request brings the three before it to its own moment.
- `long`: Poisson, and prompts of 32,000 tokens when a third and two thirds have come.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

LONG = 32_000  # tokens
KINDS = ("poisson", "bursts", "long")
QUANTILES = (50, 90, 99)
FIGURES = tuple(f"{what} p{q}" for what in ("first", "between") for q in QUANTILES)
_BURST = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in s after the first moment, its prompt's tokens, its output's."""

    due_s: float
    num_input: int
    num_output: int

    @property
    def is_long(self) -> bool:
        """Whether it is there to disturb the others."""
        return self.num_input >= LONG


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in their order."""

    kind: str
    rate: float  # requests a second
    seed: int
    arrivals: tuple[Arrival, ...]

    @property
    def name(self) -> str:
        """The kind and the seed."""
        return f"{self.kind}-{self.seed}"


@dataclass(slots=True)
class Answers:
    """When the tokens of each request came, in s; and the steps: (start, took, decodes, chunks)."""

    trace: Trace
    times: list[list[float]] = field(default_factory=list)
    steps: list[tuple[float, float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.trace.arrivals]

    def first_ms(self, longs: bool = False) -> list[float]:
        """List times to the first token, of all but long prompts, or of these alone."""
        pairs = zip(self.trace.arrivals, self.times, strict=True)
        return [1e3 * (times[0] - a.due_s) for a, times in pairs if a.is_long == longs]

    def between_ms(self) -> list[float]:
        """List times between tokens, of all but long prompts."""
        pairs = zip(self.trace.arrivals, self.times, strict=True)
        return [
            1e3 * (b - a) for each, times in pairs if not each.is_long for a, b in pairwise(times)
        ]

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(times[-1] for times in self.times)

    @property
    def peak(self) -> float:
        """Requests a second until nine tenths are answered: then steps become emptier."""
        ends = sorted(times[-1] for times in self.times)
        most = len(ends) * 9 // 10
        return most / ends[most - 1]

    def figures(self) -> dict[str, float]:
        """Return `FIGURES` in ms, of all requests but long ones."""
        first, between = self.first_ms(), self.between_ms()
        values = [*np.percentile(first, QUANTILES), *np.percentile(between, QUANTILES)]
        return dict(zip(FIGURES, (round(float(each), 2) for each in values), strict=True))


def _log_normal(
    rng: np.random.Generator, median: float, sigma: float, low: int, high: int, count: int
) -> list[int]:
    drawn = rng.lognormal(np.log(median), sigma, count)
    return np.clip(drawn, low, high).astype(int).tolist()


def lengths(seed: int, count: int) -> list[tuple[int, int]]:
    """Draw tokens in and out of `count` requests."""
    rng = np.random.default_rng(seed)
    ins = _log_normal(rng, 300, 1.1, 4, 4000, count)
    outs = _log_normal(rng, 200, 0.7, 2, 800, count)
    return list(zip(ins, outs, strict=True))


def trace(kind: str, rate: float, seed: int, count: int = 300) -> Trace:
    """Draw a trace of `count` requests, those of `LONG` tokens not counted."""
    assert kind in KINDS
    moments = np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate, count))
    if kind == "bursts":
        moments = np.repeat(moments[_BURST - 1 :: _BURST], _BURST)[:count]
    sizes = lengths(seed, len(moments))
    arrivals = [Arrival(float(at), *size) for at, size in zip(moments, sizes, strict=True)]
    if kind == "long":
        thirds = (float(moments[len(moments) * i // 3]) for i in (1, 2))
        arrivals += [Arrival(at, LONG, 16) for at in thirds]
    return Trace(kind, rate, seed, tuple(sorted(arrivals, key=lambda each: each.due_s)))


def at_once(seed: int = 3, count: int = 300) -> Trace:
    """Return a trace that comes all at once: its rate of answers is the peak."""
    arrivals = tuple(Arrival(0.0, *size) for size in lengths(seed, count))
    return Trace("at-once", float("inf"), seed, arrivals)
