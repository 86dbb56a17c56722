"""Serve more adapters than the device has room for: `python benchmarks/lora_served.py`.

Two parts, of random weights and of adapters of one rank on all linear layers, in one process
without sockets. Each prints what it has as it goes, and ends when its time is up; the last line is
both as JSON. On a GPU: `--shape llama-3.1-8b`, which ends within 150 s of an H200.

- `load`: see `lora_loads.py`.
- `storm`: users who each send a request when their last one has ended, with an adapter chosen by
  Zipf's law of all that are in host memory, and by turns with one adapter: `--rounds` windows of
  `--seconds` each, which begin when all requests of the other kind have ended. A share is the
  product of two: of rows a step (requests that wait for a load are in none), and of steps a second.

Before them kernels are compiled and graphs captured, as by an engine that expects adapters. Few
adapters are drawn (`--drawn`): others have their weights, and are adapters of their own to store
and pool. 2,000 of the 8B shape would be 168 GB.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lora_engine import NAME, Bench
from lora_loads import load

GOAL = 0.85
DRAWN_BYTES = 3 << 29  # of adapters with weights of their own


@dataclass(slots=True)
class Window:
    """What users got in some seconds."""

    seconds: float
    processor: float  # seconds of processor time
    num_tokens: int
    num_steps: int
    num_requests: int  # that ended

    @property
    def tokens_s(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds

    @property
    def rows(self) -> float:
        """Output tokens a step."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def step_ms(self) -> float:
        """Milliseconds a step."""
        return 1e3 * self.seconds / max(1, self.num_steps)


class Users:
    """Users who send requests one after another."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._rng = bench, random.Random(1)
        self._sent: dict[int, str] = {}  # requests that have not ended, by the kind of window

    def step(self, kind: str, choose: Callable[[], str]) -> tuple[int, int]:
        """Run a step; return how many tokens came, and how many requests ended."""
        args = self._bench.args
        while len(self._sent) < args.users:
            self._sent[self._bench.submit(choose(), self._rng, args.output)] = kind
        counts, ended = self._bench.step()
        for request in ended:
            del self._sent[request]
        return sum(counts.values()), len(ended)

    def window(self, kind: str, choose: Callable[[], str], seconds: float) -> Window:
        """Measure, once no request of another kind is left."""
        while set(self._sent.values()) != {kind}:
            self.step(kind, choose)
        begin, own, found = time.perf_counter(), time.process_time(), Window(0.0, 0.0, 0, 0, 0)
        while found.seconds < seconds or not found.num_requests:
            tokens, ended = self.step(kind, choose)
            found.num_tokens += tokens
            found.num_requests += ended
            found.num_steps += 1
            found.seconds = time.perf_counter() - begin
        found.processor = time.process_time() - own
        return found


def fill(bench: Bench) -> list[str]:
    """Put all adapters of the storm into host memory; return their names."""
    args, holder = bench.args, bench.runner.adapters
    names = [f"a{number}" for number in range(args.adapters)]
    drawn = [bench.draw(0)]
    # More than a processor's caches have, and no more memory than it takes long to write.
    num_drawn = args.drawn or max(4, min(64, DRAWN_BYTES // drawn[0].num_bytes))
    drawn += [bench.draw(seed) for seed in range(1, min(num_drawn, len(names)))]
    bench.say(f"storm: {len(drawn)} adapters are drawn")
    for number, name in enumerate(names):
        weights = drawn[number % len(drawn)]
        bench.store._put(name, "", replace(weights, digest=number.to_bytes(16)))
    each = holder.pages_of(bench.store._names[names[0]].number)
    holder.num_pages = args.pool * each
    bench.say(f"storm: {len(names)} adapters of {each} pages are in host memory")
    return names


def storm(bench: Bench) -> dict[str, object]:
    """The row of many adapters, chosen by Zipf's law."""
    args, room = bench.args, bench.store.room
    names = fill(bench)
    rng, weights = random.Random(2), [1 / (1 + place) for place in range(len(names))]
    kinds = {"one": lambda: names[0], "many": lambda: rng.choices(names, weights)[0]}
    users, found = Users(bench), dict[str, list[Window]]()
    for kind, choose in kinds.items():
        users.window(kind, choose, args.warm_seconds)
    bench.say(f"storm: warm, {room.num_there} adapters are on the device")
    num_loads = num_evictions = 0
    for _ in range(args.rounds):  # by turns
        for kind, choose in kinds.items():
            before = room.num_loads, room.num_evictions
            window = users.window(kind, choose, args.seconds)
            found.setdefault(kind, []).append(window)
            loads, evictions = room.num_loads - before[0], room.num_evictions - before[1]
            bench.say(
                f"storm: {kind}: {window.tokens_s:.0f} tokens/s, {window.rows:.1f} rows a step of "
                f"{window.step_ms:.2f} ms, {loads} loads for {window.num_requests} requests"
            )
            num_loads, num_evictions = num_loads + loads, num_evictions + evictions
    bench.engine.cancel_bridge(NAME)
    while bench.engine.has_work:
        bench.step()
    return of_windows(args, found) | {"loads": num_loads, "evictions": num_evictions}


def of_windows(args: argparse.Namespace, found: dict[str, list[Window]]) -> dict[str, object]:
    """Print the row of the storm, by medians of the windows of each kind, and return it."""

    def median(kind: str, value: Callable[[Window], float]) -> float:
        return statistics.median(map(value, found[kind]))

    def share(value: Callable[[Window], float]) -> float:
        return median("many", value) / median("one", value)

    one, many = (median(kind, lambda each: each.tokens_s) for kind in ("one", "many"))
    row: dict[str, object] = {
        "one_tokens_s": one,
        "many_tokens_s": many,
        "share": many / one,
        "share_of_rows": share(lambda each: each.rows),
        "share_of_steps": 1 / share(lambda each: each.step_ms),
        "share_of_processor": share(lambda each: each.num_tokens / each.processor),
        "goal": GOAL,
    }
    print(
        f"storm: {args.adapters} adapters, room for {args.pool}, {args.users} users: "
        f"{many:.0f} tokens/s, with one {one:.0f} ({many / one:.2f}: rows a step "
        f"{row['share_of_rows']:.2f}, steps {row['share_of_steps']:.2f}; by processor time "
        f"{row['share_of_processor']:.2f}; goal {GOAL})",
        flush=True,
    )
    return row


def main() -> None:
    """Print both rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-small")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--drawn", type=int, default=0, help="with weights of their own")
    parser.add_argument("--pool", type=int, default=128, help="adapters that fit on the device")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window of the storm")
    parser.add_argument("--warm-seconds", type=float, default=4.0, help="before them, of each kind")
    parser.add_argument("--rounds", type=int, default=2, help="of both kinds, by turns")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--between", type=int, default=20, help="steps behind each request")
    parser.add_argument("--loads", type=int, default=12)
    parser.add_argument("--load-seconds", type=float, default=15.0, help="of all loads, at most")
    parser.add_argument("--parts", nargs="+", default=["load", "storm"], choices=["load", "storm"])
    args = parser.parse_args()
    table = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as root:
        bench = Bench(args, root)
        if "load" in args.parts:
            table["load"] = load(bench, Path(root))
        if "storm" in args.parts:
            table["storm"] = storm(bench)
        bench.say("done")
    print(json.dumps(vars(args) | {"device": bench.plan.device.type, "table": table}))


if __name__ == "__main__":
    main()
