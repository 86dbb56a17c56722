"""Does the chart's autoscaling come in time, and does it flap? `python benchmarks/autoscaling.py`.

Kubernetes' horizontal autoscaler, by its published rules, over simulated replicas (`replicas.py`)
with recorded step times: every 15 s the replicas wanted by each metric, the largest of them; none
within the tolerance of 0.1; pods that start count as idle when it grows; a window of stabilisation
and policies of the most change in a period, in either direction. Metrics reach it `LAG_S` late. A
pod serves `--start` seconds after it is made; one that is removed finishes what it has.

    python benchmarks/autoscaling.py                       # the chart's values, on several loads
    python benchmarks/autoscaling.py --metrics waiting=4   # another rule
    python benchmarks/autoscaling.py --recorded FILE --copies 6    # a recorded load alone
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import recorded_load
import yaml
from replicas import Replica, Request, Shaped, make
from traces import Arrival, lengths

VALUES = Path(__file__).parents[1] / "deploy" / "helm" / "slipstream" / "values.yaml"
MAX_REPLICAS = 8
SYNC_S = 15.0
TOLERANCE = 0.1
LAG_S = 20.0  # of scraping and the adapter
LOOK_S = 0.25
READERS: dict[str, Callable[[Replica], float]] = {
    "waiting": lambda replica: float(len(replica.waiting)),
    "running": lambda replica: float(replica.num_running),
    "kv": lambda replica: replica.usage,
}
_NAMES = {
    "slipstream_waiting_requests": "waiting",
    "slipstream_running_sequences": "running",
    "slipstream_kv_usage": "kv",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What the chart's `autoscaling` says; times in s.

    Args:
        targets: metric of `READERS` -> its average of a pod.
        up_window, down_window: of stabilisation.
        up: policies (pods, percent, period) of which the largest holds; 0: none.
        down: (pods, period).
    """

    targets: dict[str, float]
    minimum: int = 1
    maximum: int = 8
    up_window: float = 0.0
    down_window: float = 300.0
    up: tuple[int, int, float] = (2, 100, 60.0)
    down: tuple[int, float] = (1, 120.0)


def number(quantity: str | float) -> float:
    """Return a Kubernetes quantity: 700m is 0.7."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def rule_of(values: dict[str, Any]) -> Rule:
    """Return the rule of a chart's values."""
    found = values["autoscaling"]
    up, down = found["scaleUp"], found["scaleDown"]
    return Rule(
        {_NAMES[each["name"]]: number(each["value"]) for each in found["metrics"]},
        found["replicas"]["minimum"],
        MAX_REPLICAS,
        up["stabilizationSeconds"],
        down["stabilizationSeconds"],
        (up["pods"], up["percent"], up["periodSeconds"]),
        (down["pods"], down["periodSeconds"]),
    )


def wanted(value: float, target: float, ready: int, unready: int) -> int:
    """Return the replicas that one metric wants.

    `value` is its sum over ready pods. Pods that are not ready are left out, and then counted as
    idle if that would make it grow; if the two disagree in direction nothing changes.
    """
    now = ready + unready
    if not ready:
        return now
    ratio = value / ready / target
    if not unready or ratio <= 1:
        return now if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready - 1e-9)
    again = value / now / target
    if again < 1 or abs(again - 1) <= TOLERANCE:
        return now
    return math.ceil(again * now - 1e-9)


@dataclass
class Autoscaler:
    """Its memory: what it recommended, and when it changed what."""

    rule: Rule
    recommended: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)  # (s, replicas more)

    def decide(self, now_s: float, sums: dict[str, float], ready: int, unready: int) -> int:
        """Return the number of replicas to have from now on."""
        rule, current = self.rule, ready + unready
        each = [wanted(sums[name], to, ready, unready) for name, to in rule.targets.items()]
        raw = min(max(max(each), rule.minimum), rule.maximum)
        if not self.recommended:
            self.recommended.append((now_s, current))
        self.recommended.append((now_s, raw))
        up = min([raw, *(n for at, n in self.recommended if at > now_s - rule.up_window)])
        down = max([raw, *(n for at, n in self.recommended if at > now_s - rule.down_window)])
        steady = min(max(current, up), down)
        if steady > current:
            pods, percent, period = rule.up
            start = current - self._changed(now_s - period, 1)
            steady = min(steady, max(start + pods, math.ceil(start * (1 + percent / 100))))
        elif steady < current:
            pods, period = rule.down
            start = current - self._changed(now_s - period, -1)
            steady = max(steady, start - pods)
        steady = min(max(steady, rule.minimum), rule.maximum)
        if steady != current:
            self.changes.append((now_s, steady - current))
        return steady

    def _changed(self, since_s: float, sign: int) -> int:
        return sum(n for at, n in self.changes if at > since_s and n * sign > 0)


@dataclass(slots=True)
class Outcome:
    """What a run was: the replicas at each decision, waits in ms by the time of arrival."""

    counts: list[tuple[float, int]]
    waits: list[tuple[float, float]]
    changes: list[tuple[float, int]]

    def turns(self, since_s: float = 0.0) -> int:
        """Return how often it went up after it had gone down, or down after up."""
        signs = [n > 0 for at, n in self.changes if at >= since_s]
        return sum(a != b for a, b in pairwise(signs))

    def percentile(self, q: float, since_s: float = 0.0, until_s: float = math.inf) -> float:
        """Return a percentile of first tokens, in ms, of requests that came in that time."""
        found = [wait for at, wait in self.waits if since_s <= at < until_s]
        return float(np.percentile(found, q))

    def mean_replicas(self) -> float:
        """Return the mean number of replicas."""
        return sum(n for _, n in self.counts) / len(self.counts)


Load = Callable[[float], float]  # s -> requests a second


def arrivals(load: Load, seconds: float, seed: int) -> list[Request]:
    """Draw requests with a rate that changes, by thinning; lengths are those of `traces.py`."""
    rng = np.random.default_rng([seed, 7])
    top = max(load(s) for s in np.arange(0.0, seconds, 1.0))
    moments = np.cumsum(rng.exponential(1 / top, int(top * seconds * 1.2) + 10))
    keeps = rng.uniform(0, top, len(moments))
    pairs = zip(moments, keeps, lengths(seed, len(moments)), strict=True)
    return [
        Request(Arrival(float(at), *size))
        for at, keep, size in pairs
        if at < seconds and keep < load(float(at))
    ]


def simulate(
    rule: Rule, requests: Sequence[Request], seconds: float, start_s: float, first: int
) -> Outcome:
    """Serve the requests with `first` replicas at the beginning; the emptiest gets each."""
    scaler, shaped = Autoscaler(rule), Shaped()
    pods = [make(shaped)[0] for _ in range(first)]
    leaving: list[Replica] = []
    seen: list[tuple[float, list[tuple[Replica, dict[str, float]]]]] = []
    counts, at, now_s, sync_s = [], 0, 0.0, SYNC_S
    while now_s < seconds:
        ready = [replica for replica in pods if replica.born_s <= now_s]
        now_s += LOOK_S
        while at < len(requests) and requests[at].arrival.due_s <= now_s:
            min(ready, key=lambda replica: replica.load).submit(requests[at])
            at += 1
        for replica in (*pods, *leaving):
            replica.advance(now_s)
        seen.append((now_s, [(r, {n: f(r) for n, f in READERS.items()}) for r in ready]))
        if now_s >= sync_s:
            sync_s += SYNC_S
            _scale(scaler, pods, leaving, _late(seen, now_s), (now_s, start_s))
            counts.append((now_s, len(pods)))
            leaving = [replica for replica in leaving if replica.load]
    for replica in (*pods, *leaving):
        replica.advance(now_s + 600)
    waits = [
        (each.arrival.due_s, 1e3 * ((each.first_s or now_s + 600) - each.arrival.due_s))
        for each in requests[:at]
    ]
    return Outcome(counts, waits, scaler.changes)


def _late(
    seen: list[tuple[float, list[tuple[Replica, dict[str, float]]]]], now_s: float
) -> list[tuple[Replica, dict[str, float]]]:
    """Return the metrics of `LAG_S` ago, and drop older ones."""
    while len(seen) > 1 and seen[1][0] <= now_s - LAG_S:
        seen.pop(0)
    return seen[0][1]


def _scale(
    scaler: Autoscaler,
    pods: list[Replica],
    leaving: list[Replica],
    metrics: Iterable[tuple[Replica, dict[str, float]]],
    times: tuple[float, float],
) -> None:
    """Make or remove pods: those that do not serve yet go first, then the newest."""
    now_s, start_s = times
    known = [(replica, values) for replica, values in metrics if replica in _Identities(pods)]
    sums = {name: sum(values[name] for _, values in known) for name in READERS}
    number_now = scaler.decide(now_s, sums, len(known), len(pods) - len(known))
    while len(pods) < number_now:
        pods.append(make(Shaped(), now_s + start_s)[0])
    while len(pods) > number_now:
        leaving.append(pods.pop())


class _Identities:
    """Membership by identity: replicas compare by value."""

    def __init__(self, members: Iterable[object]) -> None:
        self._ids = {id(each) for each in members}

    def __contains__(self, each: object) -> bool:
        return id(each) in self._ids


def steady(rate: float) -> Load:
    """Return a load that does not change."""
    return lambda s: rate


def ramp(low: float, high: float, begin_s: float, end_s: float) -> Load:
    """Return a load that grows in a straight line."""
    return lambda s: float(np.interp(s, [begin_s, end_s], [low, high]))


def wave(low: float, high: float, period_s: float) -> Load:
    """Return a load that rises and falls as a day does."""
    return lambda s: low + (high - low) * (1 - math.cos(2 * math.pi * s / period_s)) / 2


LOADS: dict[str, tuple[Load, float, int]] = {
    "steady, half of one replica": (steady(15), 900, 1),
    "steady, 1.6 replicas": (steady(50), 900, 2),
    "ramp to fourfold in 5 minutes": (ramp(20, 80, 120, 420), 1200, 1),
    "threefold at once": (ramp(20, 60, 300, 301), 1200, 1),
    "wave of 30 minutes": (wave(15, 90, 1800), 3600, 1),
}
"""What happens -> requests a second, s, replicas at the beginning; one replica serves some 31."""
COPIES = 6  # of the recorded load, which one replica would serve


def recorded(path: Path, copies: int) -> tuple[list[Request], float]:
    """Return the requests of a recorded load, so many times as high, and its length in s."""
    found = recorded_load.overlaid(recorded_load.read(path), copies)
    return [Request(each) for each in found], math.ceil(found[-1].due_s)


def cases(
    path: Path | None, copies: int, seed: int
) -> Iterator[tuple[str, list[Request], float, int]]:
    """Yield loads: what happens, requests, s, replicas at the beginning."""
    if path is None:
        for name, (load, seconds, first) in LOADS.items():
            yield name, arrivals(load, seconds, seed), seconds, first
    requests, seconds = recorded(path or recorded_load.CHATS, copies)
    yield f"recorded, {copies} times", requests, seconds, 2


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--metrics", nargs="+", metavar="NAME=TARGET", help=", ".join(READERS))
    parser.add_argument("--start", type=float, default=60.0, help="s to start a pod (%(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="requests, as CSV")
    parser.add_argument("--copies", type=int, default=COPIES, help="of its load (%(default)d)")
    args = parser.parse_args()
    rule = rule_of(yaml.safe_load(VALUES.read_text()))
    if args.metrics:
        pairs = (each.partition("=") for each in args.metrics)
        rule = Rule({name: number(value) for name, _, value in pairs})
    print(rule)
    for name, requests, seconds, first in cases(args.recorded, args.copies, args.seed):
        out = simulate(rule, requests, seconds, args.start, first)
        print(
            f"{name:32} replicas {out.mean_replicas():5.2f}, at most "
            f"{max(n for _, n in out.counts)}  changes {len(out.changes):2}  turns {out.turns()}  "
            f"first p50 {out.percentile(50):7.1f}  p99 {out.percentile(99):9.1f} ms",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
