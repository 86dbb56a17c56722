"""Loads of adapters beside streams: the part `load` of `lora_served.py`.

The time from `POST /v1/load_lora_adapter`, with the files in the page cache, to the first token of
a request with that adapter, and the time between tokens of streams that run meanwhile, beside the
same streams and requests with an adapter that is there; `--load-seconds` at most. `held` is the
longest that loads held the engine's thread between two steps, of its processor time. The last line
says where the time goes, by medians: files are read and hashed, what was read is laid out, a step
is awaited before the engine takes it (`taken`) and starts its load (`started`), pages are copied to
the device, and the request waits for a step and runs in one.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from lora_engine import NAME, Bench
from safetensors.torch import save
from slipstream.runner.adapters import Adapters
from slipstream_contract.errors import ContractError

SPLIT = ("queued", "read", "laid out", "taken", "started", "device", "first token")
GOAL_MS, GOAL_BETWEEN = 50.0, 0.10
NUM_WARM = 2  # loads that do not count


class Marks:
    """When each part of a load ended, by the methods that do it."""

    def __init__(self, adapters: Adapters) -> None:
        self.times: dict[str, tuple[float, float]] = {}  # start and end of the last call
        for owner, name in ((adapters, "read"), (adapters, "prepared"), (adapters._loads, "run")):
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                self.times[name] = begin, time.perf_counter()

        return timed

    def split(self, begin: float, taken: float, end: float) -> list[float]:
        """Return how long each part of `SPLIT` took, of a load from `begin` to `end`."""
        read, laid, device = (self.times[name] for name in ("read", "prepared", "run"))
        ends = [begin, read[0], laid[0], laid[1], taken, *device, end]
        return [after - before for before, after in pairwise(ends)]


def write(bench: Bench, root: Path) -> None:
    """Write adapters as PEFT does, of one's tensors with a number in each of them."""
    weights, tensors = bench.draw(10_000), {}
    for part in bench.targets.all():
        for term in weights.terms.get(part.place, ()):
            if term.first == part.first and term.a is not None:
                module = f"base_model.model.{part.name}"
                tensors[f"{module}.lora_A.weight"] = term.a.contiguous()
                tensors[f"{module}.lora_B.weight"] = term.b.contiguous()
    config = {"peft_type": "LORA", "r": bench.args.rank, "lora_alpha": bench.args.rank}
    for number in range(NUM_WARM + bench.args.loads):
        folder = root / f"l{number}"
        folder.mkdir()
        for tensor in tensors.values():
            tensor[0, 0] = number + 1
        (folder / "adapter_model.safetensors").write_bytes(save(tensors))
        (folder / "adapter_config.json").write_text(json.dumps(config))


def p99(times: list[float]) -> float:
    """The time that one in a hundred is above, in milliseconds."""
    return 1e3 * statistics.quantiles(times, n=100)[98]


class Streams:
    """Streams, and the time between their tokens."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._rng = bench, random.Random(3)
        self._numbers = {bench.submit("", self._rng, 1 << 14) for _ in range(bench.args.streams)}
        self._last: dict[int, float] = {}
        self.gaps: list[float] = []

    def step(self) -> dict[int, int]:
        """Run a step; return how many tokens each request got."""
        counts, _ = self._bench.step()
        now = time.perf_counter()
        for number in counts.keys() & self._numbers:
            if number in self._last:
                self.gaps.append(now - self._last[number])
            self._last[number] = now
        return counts

    def ask(self, adapter: str) -> None:
        """Wait for the first token of a request."""
        request = self._bench.submit(adapter, self._rng, 1)
        while request not in self.step():
            pass

    def run(self) -> None:
        """Run the steps between requests."""
        for _ in range(self._bench.args.between):
            self.step()


def refuse(error: ContractError | None) -> None:
    """Raise why an adapter is not loaded."""
    if error is not None:
        raise error


def load(bench: Bench, root: Path) -> dict[str, object]:
    """The row of loads beside streams."""
    args, store = bench.args, bench.store
    write(bench, root)
    bench.say("load: files are written")
    store._put("there", "", bench.draw(9_999))
    streams, marks = Streams(bench), Marks(bench.runner.adapters)
    times: list[float] = []
    splits: list[list[float]] = []
    beside: list[float] = []  # gaps
    end = time.perf_counter() + args.load_seconds
    for number in range(NUM_WARM + args.loads):
        streams.gaps.clear()
        name = f"l{number}"
        begin = time.perf_counter()
        store.start_load(name, name, refuse)
        while name not in store._names:
            streams.step()
        taken = time.perf_counter()
        streams.ask(name)
        now = time.perf_counter()
        streams.run()
        store.unload(name)
        if number < NUM_WARM:
            bench.held = 0.0
            continue
        beside += streams.gaps
        times.append(now - begin)
        splits.append(marks.split(begin, taken, now))
        if now > end:
            break
    bench.say(f"load: {len(times)} adapters were loaded")
    streams.ask("there")
    streams.gaps.clear()
    for _ in range(len(times)):
        streams.run()
        streams.ask("there")
    alone = streams.gaps
    store.unload("there")
    bench.engine.cancel_bridge(NAME)
    while bench.engine.has_work:
        bench.step()
    return report(times, splits, (p99(beside), p99(alone)), bench.held, args.streams)


def report(
    times: list[float],
    splits: list[list[float]],
    between: tuple[float, float],
    held: float,
    num_streams: int,
) -> dict[str, object]:
    """Print the row of loads; `between` tokens, with and without, in ms, all else in seconds."""
    seconds, (beside, alone) = statistics.median(times), between
    parts = [1e3 * statistics.median(part) for part in zip(*splits, strict=True)]
    split = dict(zip(SPLIT, parts, strict=True))
    row = {
        "ms": 1e3 * seconds,
        "goal_ms": GOAL_MS,
        "p99_ms": beside,
        "p99_alone_ms": alone,
        "held_ms": 1e3 * held,
        "goal_more": GOAL_BETWEEN,
        "split_ms": split,
    }
    print(
        f"load: {row['ms']:.1f} ms from files to the first token (goal {GOAL_MS:.0f}); "
        f"{num_streams} streams meanwhile: p99 between tokens {beside:.1f} ms, "
        f"without loads {alone:.1f} "
        f"({beside / alone - 1:+.0%}; goal {GOAL_BETWEEN:+.0%}); held {1e3 * held:.2f} ms\n"
        "  of which " + ", ".join(f"{name} {ms:.1f}" for name, ms in split.items()),
        flush=True,
    )
    return row
