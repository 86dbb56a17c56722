"""First tokens and times between tokens under open load, simulated: `python benchmarks/tails.py`.

Drives the real engine over recorded step times (`step_times.py`), beside a stand-in for vLLM
(`simulated.py`), on traces whose seeds are drawn (`traces.py`). Rates are shares of the slower
one's peak, so neither is overloaded. For each trace it prints first tokens and times between tokens
in ms; the last table gives ours over the best of the stand-in's settings: goals are 0.85 for the
first token's p50 and p90 and 1.0 for its p99, and 1.0 for both between tokens, beside the setting
with the best p99 of first tokens. All tokens of a kind count alike, so a trace's p99 is that of
some 300 requests. Traces of the kind `recorded` are pieces of an hour that was recorded
(`recorded_load.py`), made faster to the rate; the peak is that of its requests, too.
"""

import argparse
import functools
import json
import math
import secrets
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import recorded_load
import simulated
from slipstream.engine.scheduler import Limits
from step_times import SIZES, times_of
from traces import FIGURES, KINDS, Answers, Arrival, Trace, at_once, trace

# A step with prompts is what the p90 between tokens meets, or not, by how many there are: no goal.
GOALS = dict(zip(FIGURES, (0.85, 0.85, 1.0, 1.0, math.inf, 1.0), strict=True))
PEER_BUDGETS = (2048, 4096, 8192)
RECORDED = "recorded"
_REQUESTS, _PEAK_REQUESTS = 300, 600

Run = Callable[[Trace], Answers]


@dataclass(frozen=True, slots=True)
class Case:
    """A card, a shape, and a share of the peak."""

    card: str
    shape: str
    load: float


def runs(case: Case, limits: Limits) -> tuple[Run, dict[str, Run]]:
    """Return the engine, and the settings of the stand-in."""
    ours, peer = (times_of(case.shape, case.card, engine) for engine in ("slipstream", "vllm"))

    def setting(budget: int) -> Run:
        return lambda each: simulated.first_come(each, peer, budget)

    def engine(each: Trace) -> Answers:
        return simulated.slipstream(each, ours, limits)

    return engine, {f"vllm {budget}": setting(budget) for budget in PEER_BUDGETS}


@functools.cache
def hour() -> list[Arrival]:
    """Return the recorded load."""
    return recorded_load.read()


def drawn(kind: str, rate: float, seed: int) -> Trace:
    """Draw a trace of a kind, recorded ones by their beginning."""
    if kind != RECORDED:
        return trace(kind, rate, seed, _REQUESTS)
    first = np.random.default_rng(seed).integers(len(hour()) - _REQUESTS)
    found = recorded_load.piece(hour(), int(first), _REQUESTS, rate)
    return Trace(kind, rate, seed, tuple(found))


def closed_of(kind: str) -> Trace:
    """Return requests of a kind that come all at once."""
    if kind != RECORDED:
        return at_once(count=_PEAK_REQUESTS)
    spread = hour()[:: len(hour()) // _PEAK_REQUESTS][:_PEAK_REQUESTS]
    return Trace(kind, 0.0, 0, tuple(replace(each, due_s=0.0) for each in spread))


def peak(case: Case, limits: Limits, kind: str = "poisson") -> float:
    """Return requests a second of the slower one, of its best setting."""
    ours, peers = runs(case, limits)
    closed = closed_of(kind)
    return min(ours(closed).peak, max(run(closed).peak for run in peers.values()))


def beside(ours: dict[str, float], peers: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return ours over the best setting's; between tokens over that with the best first p99."""
    best = min(peers.values(), key=lambda each: each["first p99"])
    ratios = {}
    for name in FIGURES:
        least = min(each[name] for each in peers.values())
        ratios[name] = ours[name] / (least if name.startswith("first") else best[name])
    return ratios


def shown(values: Iterable[float]) -> str:
    """Return figures in columns."""
    return "".join(f"{value:12.2f}" for value in values)


def measure(case: Case, kinds: list[str], seeds: list[int], limits: Limits) -> dict[str, object]:
    """Run every trace of a case, and print its figures."""
    ours, peers = runs(case, limits)
    rates = {kind: case.load * peak(case, limits, kind) for kind in kinds}
    said = ", ".join(f"{kind} {rate:.1f}" for kind, rate in rates.items())
    print(f"\n{case.card} {case.shape}, {case.load:.0%} of the peak: {said} requests/s")
    print(f"{'':26}" + "".join(f"{name:>12}" for name in FIGURES))
    found = []
    for number, seed in enumerate(seeds):
        kind = kinds[number % len(kinds)]
        each = drawn(kind, rates[kind], seed)
        row = ours(each).figures()
        others = {name: run(each).figures() for name, run in peers.items()}
        for name, values in {"slipstream": row, **others}.items():
            print(f"{each.name:14.14}{name:12}{shown(values.values())}", flush=True)
        ratios = beside(row, others)
        found.append({"trace": each.name, "slipstream": row, "peers": others, "ratios": ratios})
    ratios = {name: statistics.median(each["ratios"][name] for each in found) for name in FIGURES}
    print(f"{'median ratio':26}{shown(ratios.values())}")
    parts = {"card": case.card, "shape": case.shape, "load": case.load, "rates": rates}
    return {**parts, "ratios": ratios, "traces": found}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", default=["H100"], choices=("H100", "H200"))
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=SIZES)
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.7, 0.9])
    parser.add_argument("--kinds", nargs="+", default=["poisson"], choices=(*KINDS, RECORDED))
    parser.add_argument("--traces", type=int, default=20, help="of each case; kinds take turns")
    parser.add_argument("--seed", type=int, help="of all traces (default: drawn)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="ours")
    parser.add_argument("--target-itl", type=float, default=0.0, help="ours, ms (default: none)")
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}")
    seeds = np.random.default_rng(seed).integers(0, 10**6, args.traces).tolist()
    target_ns = round(args.target_itl * 1e6)
    limits = Limits(simulated.MAX_ROWS, args.max_num_batched_tokens, target_itl_ns=target_ns)
    cases = [Case(c, s, load) for c in args.cards for s in args.shapes for load in args.loads]
    results = [measure(case, args.kinds, seeds, limits) for case in cases]
    print("\nours over the stand-in's best; to reach:" + " ".join(f" {g}" for g in GOALS.values()))
    for case, result in zip(cases, results, strict=True):
        name = f"{case.card} {case.shape} {case.load:.0%}"
        print(f"{name:26}{shown(result['ratios'].values())}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"seed": seed, "cases": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
