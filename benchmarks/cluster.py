"""What a cluster serves, simulated from measured step times: `python benchmarks/cluster.py`.

Replicas (`replicas.py`) behind a router: `random`, `least` (the fewest requests that wait or run),
`turns` (one after the other), `prefix` (where the longest prefix is cached, unless that one is much
fuller than the emptiest), or `slipstream` (what `--replicas` does: `slipstream.replicas.policy`).
A router knows of replicas what they last published, every `--look` seconds, and what it sent since.

    python benchmarks/cluster.py --gpus 8 64 1000 --load 0.8
    python benchmarks/cluster.py --gpus 8 --tensor 2 --shape 14b --policies least
    python benchmarks/cluster.py --gpus 64 --recorded benchmarks/recorded/azure-2023-chats.csv.gz

The load is a share of the rate at which one set of GPUs alone still has 99 of 100 first tokens
within `LATE_MS`. Requests are chats: each continues one of `--chats` conversations a GPU, whose
history is the prefix that it shares with the turn before; lengths are those of `traces.py`. With
`--recorded` they are those of a file (`recorded_load.py`), at the rate wanted, without prefixes.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import recorded_load
from limits import CARDS
from replicas import Replica, Request, Shaped, make
from slipstream.replicas.policy import View, choose
from step_times import SIZES
from traces import Arrival, lengths

POLICIES = ("random", "turns", "least", "prefix", "slipstream")
_SLACK = 8  # requests that a replica may have more than the emptiest, for its prefix
_LOOK_S = 0.05
LATE_MS = 500.0  # p99 of first tokens, above which a rate is too high
_MAX_HISTORY = 8_000  # tokens


class Router:
    """Sends requests to replicas by a policy, from what is known of them."""

    def __init__(self, policy: str, replicas: Sequence[Replica], seed: int = 0) -> None:
        assert policy in POLICIES
        self.replicas = list(replicas)
        self._policy = policy
        self._rng = random.Random(seed)
        self._known = [0] * len(self.replicas)  # load, as published and sent since
        self._last: dict[str, int] = {}  # prefix -> the replica that had it last
        self._turns = itertools.count()
        self._sent = [0] * len(self.replicas)
        self.look()

    def look(self) -> None:
        """Take what replicas publish now."""
        self._known = [replica.load for replica in self.replicas]

    def send(self, request: Request) -> None:
        """Choose a replica, and give it the request."""
        at = self._choose(request)
        self._known[at] += 1
        if request.prefix:
            self._last[request.prefix] = at
        self.replicas[at].submit(request)

    def _by_cost(self, request: Request) -> int:
        """Choose as a server with replicas does, which sees each token as it is made."""
        num_prompt = request.arrival.num_input
        views = {
            at: View(
                each.cached(request),
                each.num_queued,
                each.used,
                each.kv_tokens,
                each.num_decodes,
                self._sent[at],
            )
            for at, each in enumerate(self.replicas)
        }
        chosen = choose(views, num_prompt)
        assert chosen is not None, "there are replicas"
        self._sent[chosen] += 1
        return chosen

    def _choose(self, request: Request) -> int:
        if self._policy == "random":
            return self._rng.randrange(len(self.replicas))
        if self._policy == "turns":
            return next(self._turns) % len(self.replicas)
        if self._policy == "slipstream":
            return self._by_cost(request)
        least = min(self._known)
        if self._policy == "prefix":
            had = self._last.get(request.prefix)
            if had is not None and self._known[had] <= least + _SLACK:
                return had
        ties = [at for at, load in enumerate(self._known) if load == least]
        return self._rng.choice(ties)


def run(
    router: Router, requests: Sequence[Request], look_s: float = _LOOK_S, end_s: float = 0.0
) -> None:
    """Serve all requests, in their order, to their end; or to `end_s`."""
    at, now_s = 0, 0.0
    while at < len(requests):
        now_s = max(now_s + look_s, requests[at].arrival.due_s)
        for replica in router.replicas:
            replica.advance(now_s)
        router.look()
        while at < len(requests) and requests[at].arrival.due_s <= now_s + look_s:
            router.send(requests[at])
            at += 1
    while any(replica.load for replica in router.replicas) and not 0 < end_s <= now_s:
        now_s += 1.0
        for replica in router.replicas:
            replica.advance(now_s)


def chats(rate: float, seconds: float, num_chats: int, seed: int) -> list[Request]:
    """Draw turns of conversations at a rate (requests a second), Poisson.

    A turn's prompt is the conversation so far, which is its prefix, and a new question.
    """
    rng = np.random.default_rng(seed)
    moments = np.cumsum(rng.exponential(1 / rate, max(1, round(rate * seconds))))
    sizes = lengths(seed, len(moments))
    names = rng.integers(0, num_chats, len(moments))
    history: dict[int, int] = {}
    requests = []
    for due_s, (num_input, num_output), name in zip(moments, sizes, names, strict=True):
        before = history.get(name, 0)
        if before + num_input + num_output > _MAX_HISTORY:
            before = 0  # another conversation
        arrival = Arrival(float(due_s), before + num_input, num_output)
        requests.append(Request(arrival, str(name), before))
        history[name] = before + num_input + num_output
    return requests


Draw = Callable[[float, float, int, int], list[Request]]


def drawn_of(path: Path | None) -> Draw:
    """Return what draws requests at a rate, for some seconds, of so many chats and a seed."""
    if path is None:
        return chats
    found = recorded_load.read(path)
    return lambda rate, seconds, num_chats, seed: [
        Request(each) for each in recorded_load.at_rate(found, rate, seconds)
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a run; times in ms, rates a second."""

    gpus: int
    policy: str
    rate: float
    tokens: float  # of answers, a second and GPU
    first_p50: float
    first_p99: float
    between_p50: float
    found: float  # the share of prompts' tokens that were cached
    busiest: float  # requests of the fullest replica over the mean


def served(policy: str, gpus: int, router: Router, requests: Sequence[Request]) -> Served:
    """Return the figures of a run, its first tenth left out."""
    counted = requests[len(requests) // 10 :]
    first = [1e3 * (each.first_s - each.arrival.due_s) for each in counted]
    between = [
        1e3 * (each.end_s - each.first_s) / (each.arrival.num_output - 1)
        for each in counted
        if each.arrival.num_output > 1
    ]
    replicas = router.replicas
    seconds = max(each.end_s for each in requests)
    steps = [replica.num_output for replica in replicas]
    prompts = sum(each.arrival.num_input for each in requests)
    return Served(
        gpus,
        policy,
        len(requests) / requests[-1].arrival.due_s,
        sum(steps) / seconds / gpus,
        *(float(np.percentile(first, q)) for q in (50, 99)),
        float(np.percentile(between, 50)),
        sum(replica.num_found for replica in replicas) / prompts,
        max(steps) / (sum(steps) / len(steps)),
    )


def peak(
    shaped: Shaped, num_chats: int, draw: Draw = chats, seed: int = 3, seconds: float = 30.0
) -> float:
    """Return the requests a second of one set of GPUs at which first tokens are just in time.

    In time: their p99 is at most `LATE_MS`. Prefixes stay where they are.
    """
    low, high = 0.0, 256.0
    for _ in range(9):
        rate = (low + high) / 2
        requests = draw(rate, seconds, num_chats, seed)
        router = Router("prefix", make(shaped), seed)
        run(router, requests)
        is_in_time = served("prefix", shaped.gpus, router, requests).first_p99 <= LATE_MS
        low, high = (rate, high) if is_in_time else (low, rate)
    return low


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> list[Served]:
    """Run every number of GPUs under every policy."""
    shaped = Shaped(args.shape, args.card, args.tensor, args.pipeline)
    draw = drawn_of(args.recorded)
    most = peak(shaped, args.chats * shaped.gpus, draw)
    say(
        f"{args.shape} on {args.card}, tensor {args.tensor}, pipeline {args.pipeline}: "
        f"at most {most / shaped.gpus:.1f} requests/s a GPU, cache of "
        f"{shaped.kv_tokens() * shaped.pipeline:,} tokens a replica"
    )
    rows = []
    for gpus in args.gpus:
        sets = gpus // shaped.gpus
        if not sets:
            raise ValueError(f"--gpus {gpus} is less than a replica's {shaped.gpus}")
        for policy in args.policies:
            begin = time.perf_counter()
            router = Router(policy, [r for _ in range(sets) for r in make(shaped)], args.seed)
            rate = args.load * most * sets
            requests = draw(rate, args.seconds, args.chats * gpus, args.seed)
            run(router, requests, args.look)
            row = served(policy, gpus, router, requests)
            took = time.perf_counter() - begin
            rows.append(row)
            say(
                f"{row.gpus:5} GPUs  {row.policy:7} {row.rate:9.1f} req/s "
                f"{row.tokens:7.0f} tok/s/GPU  first {row.first_p50:7.1f} {row.first_p99:9.1f} ms  "
                f"between {row.between_p50:5.2f}  cached {row.found:4.0%}  "
                f"busiest {row.busiest:4.2f}  ({took:.0f} s)"
            )
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 1000])
    found.add_argument("--card", choices=CARDS, default="H100")
    found.add_argument("--shape", choices=SIZES, default="8b")
    found.add_argument("--tensor", type=int, default=1)
    found.add_argument("--pipeline", type=int, default=1)
    found.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    found.add_argument("--load", type=float, default=0.8, help="share of the peak (%(default)g)")
    found.add_argument("--seconds", type=float, default=20.0, help="of arrivals (%(default)g)")
    found.add_argument("--chats", type=int, default=60, help="conversations a GPU (%(default)d)")
    found.add_argument("--recorded", type=Path, metavar="FILE", help="requests, as CSV")
    found.add_argument("--look", type=float, default=_LOOK_S, help="(%(default)g s)")
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--output", type=Path, help="JSON")
    return found


def main() -> int:
    """Command line."""
    args = parser().parse_args()
    rows = measure(args, lambda line: print(line, flush=True))
    if args.output:
        kept = {name: value for name, value in vars(args).items() if name != "output"}
        kept["recorded"] = kept["recorded"] and args.recorded.name
        rows_json = [asdict(row) for row in rows]
        args.output.write_text(json.dumps({"options": kept, "rows": rows_json}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
