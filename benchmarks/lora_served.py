"""Serve more adapters than the device has room for: `python benchmarks/lora_served.py`.

Two rows, of random weights and of adapters of one rank on all linear layers, in one process without
sockets. The last line is both as JSON.

- `storm`: users who each send a request when their last one has ended, with an adapter chosen by
  Zipf's law of all that are in host memory. Beside it the same requests with one adapter.
- `load`: the time from `POST /v1/load_lora_adapter`, with the files in the page cache, to the first
  token of a request with that adapter, and the time between tokens of streams that run meanwhile,
  beside the same streams and requests with an adapter that is there. `held` is the longest that
  loads held the engine's thread between two steps, of its processor time. The line below says where
  the time goes, by medians: files are read and hashed, what was read is laid out, a step is awaited
  before the engine takes it (`taken`) and starts its load (`started`), pages are copied to the
  device, and the request waits for a step and runs in one.

Few adapters are drawn (`--drawn`): others have their weights, and are adapters of their own to
store and pool. 2,000 of the 8B shape would be 168 GB. On a GPU: `--shape llama-3.1-8b`.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lora import draw
from safetensors.torch import save_file
from shapes import write_config
from slipstream.config import EngineConfig
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.models.adapters.read import AdapterWeights
from slipstream.models.adapters.targets import Targets
from slipstream.runner.adapters import Adapters
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.errors import ContractError
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

SPLIT = ("queued", "read", "laid out", "taken", "started", "device", "first token")
GOALS = {"storm": 0.85, "load_ms": 50.0, "between": 0.10}
NAME = b"users"


class Bench:
    """An engine of a shape, in this thread."""

    def __init__(self, args: argparse.Namespace, root: str) -> None:
        self.args = args
        folder = Path(root, "model")
        folder.mkdir()
        write_config(args.shape, folder)
        config = EngineConfig(
            checkpoint=str(folder),
            load_format="random",
            kv_cache_tokens=2 * args.users * (args.prompt + args.output),
            max_num_seqs=args.users,
        )
        self.plan = resolve(config)
        self.runner = ModelRunner(self.plan)
        found = self.runner.adapters.targets
        assert found is not None, "a family's model serves adapters"
        self.targets: Targets = found
        limits = Limits(args.users, 2048, kv_cache_reuse=False)
        self.store = AdapterStore(self.runner.adapters, root)
        self.engine = Engine(limits, self.runner, None, adapters=self.store)
        self.held = 0.0  # seconds
        self._next = 0

    def draw(self, seed: int) -> AdapterWeights:
        """An adapter in host memory, as reading one makes it."""
        cpu = self.plan.device.type == "cpu"
        made = draw(self.targets, self.args.rank, self.plan.dtype, self.plan.device, seed)
        if cpu:
            return self.runner.adapters.prepared(made)
        host = {place: tuple(t.to("cpu") for t in terms) for place, terms in made.terms.items()}
        return self.runner.adapters.prepared(AdapterWeights(host, made.digest, made.rank))

    def submit(self, adapter: str, rng: random.Random, num_tokens: int) -> int:
        """Ask for so many tokens behind a random prompt; return the request's number."""
        prompt = [rng.randrange(3, self.runner.vocab_size) for _ in range(self.args.prompt)]
        sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)
        self._next += 1
        message = Submit(self._next, pack(prompt), sampling, time.monotonic_ns(), adapter=adapter)
        self.engine.submit(NAME, message)
        return self._next

    def step(self) -> tuple[dict[int, int], set[int]]:
        """Run a step; return how many tokens each request got, and the requests that ended."""
        if self.store.is_loading:
            begin = time.thread_time()
            self.store.poll()
            self.held = max(self.held, time.thread_time() - begin)
        counts: dict[int, int] = {}
        ended: set[int] = set()
        for tokens in self.engine.step().get(NAME, ()):
            counts[tokens.request] = counts.get(tokens.request, 0) + len(tokens.token_ids)
            if tokens.finished is not None:
                ended.add(tokens.request)
        return counts, ended


class Marks:
    """When each part of a load ended, by the methods that do it."""

    def __init__(self, adapters: Adapters) -> None:
        self.times: dict[str, tuple[float, float]] = {}  # start and end of the last call
        for name in ("read", "prepared", "_load"):
            setattr(adapters, name, self._timed(name, getattr(adapters, name)))

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
        read, laid, device = (self.times[name] for name in ("read", "prepared", "_load"))
        ends = [begin, read[0], laid[0], laid[1], taken, *device, end]
        return [after - before for before, after in pairwise(ends)]


class Rate(NamedTuple):
    """Output tokens a second, and a second of processor time."""

    wall: float
    processor: float


def rate(bench: Bench, choose: Callable[[], str], num_requests: int) -> Rate:
    """Serve users who send requests one after another."""
    rng, args = random.Random(1), bench.args
    for _ in range(args.users):
        bench.submit(choose(), rng, args.output)
    sent, total = args.users, 0
    begin, own = time.perf_counter(), time.process_time()
    while bench.engine.has_work:
        counts, ended = bench.step()
        total += sum(counts.values())
        for _ in ended:
            if sent < num_requests:
                bench.submit(choose(), rng, args.output)
                sent += 1
    return Rate(total / (time.perf_counter() - begin), total / (time.process_time() - own))


def storm(bench: Bench) -> dict[str, object]:
    """The row of many adapters, chosen by Zipf's law."""
    args = bench.args
    begin = time.perf_counter()
    names = [f"a{number}" for number in range(args.adapters)]
    holder, room = bench.runner.adapters, bench.store.room
    drawn = [bench.draw(seed) for seed in range(min(args.drawn, len(names)))]
    for number, name in enumerate(names):
        weights = drawn[number % len(drawn)]
        bench.store._put(name, "", replace(weights, digest=number.to_bytes(16)))
    each = holder.pages_of(bench.store._names[names[0]].number)
    holder.num_pages = args.pool * each
    rng = random.Random(2)
    weights = [1 / (1 + place) for place in range(len(names))]

    def of_many() -> str:
        return rng.choices(names, weights)[0]

    print(f"storm: adapters are there after {time.perf_counter() - begin:.1f} s", flush=True)
    found: dict[str, list[Rate]] = {"one": [], "many": []}
    rate(bench, of_many, 2 * args.users)  # warm
    before = room.num_loads, room.num_evictions
    for _ in range(args.rounds):  # by turns
        found["one"].append(rate(bench, lambda: names[0], args.requests))
        found["many"].append(rate(bench, of_many, args.requests))
    one, many = (statistics.median(each.wall for each in found[key]) for key in ("one", "many"))
    own, of_all = (
        statistics.median(each.processor for each in found[key]) for key in ("one", "many")
    )
    row = {
        "one_tokens_s": one,
        "many_tokens_s": many,
        "share": many / one,
        "share_of_processor": of_all / own,
        "goal": GOALS["storm"],
        "loads": room.num_loads - before[0],
        "evictions": room.num_evictions - before[1],
    }
    print(
        f"storm: {args.adapters} adapters, room for {args.pool}, {args.users} users: "
        f"{many:.0f} tokens/s, with one {one:.0f} ({many / one:.2f}, by processor time "
        f"{of_all / own:.2f}; goal {GOALS['storm']}), "
        f"{row['loads']} loads in {args.rounds * args.requests} requests",
        flush=True,
    )
    for name in names:
        bench.store.unload(name)
    return row


def write(bench: Bench, folder: Path, seed: int) -> None:
    """Write an adapter as PEFT does, and read it once, so that it is in the page cache."""
    folder.mkdir()
    weights, tensors = bench.draw(seed), {}
    for part in bench.targets.all():
        for term in weights.terms.get(part.place, ()):
            if term.first == part.first and term.a is not None:
                module = f"base_model.model.{part.name}"
                tensors[f"{module}.lora_A.weight"] = term.a.contiguous()
                tensors[f"{module}.lora_B.weight"] = term.b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": bench.args.rank, "lora_alpha": bench.args.rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").read_bytes()


def p99(times: list[float]) -> float:
    """The time that one in a hundred is above, in milliseconds."""
    return 1e3 * statistics.quantiles(times, n=100)[98]


def load(bench: Bench, root: Path) -> dict[str, object]:
    """The row of loads beside streams."""
    rng, args = random.Random(3), bench.args
    streams = [bench.submit("", rng, 1 << 14) for _ in range(args.streams)]
    last: dict[int, float] = {}
    gaps: list[float] = []

    def step() -> dict[int, int]:
        counts, _ = bench.step()
        now = time.perf_counter()
        for number in counts.keys() & set(streams):
            if number in last:
                gaps.append(now - last[number])
            last[number] = now
        return counts

    def ask(adapter: str) -> None:
        request = bench.submit(adapter, rng, 1)
        while request not in step():
            pass

    def refuse(error: ContractError | None) -> None:
        if error is not None:
            raise error

    bench.store._put("there", "", bench.draw(9_999))
    ask("there")
    gaps.clear()
    for _ in range(args.loads):
        for _ in range(args.between):
            step()
        ask("there")
    alone = p99(gaps)
    gaps.clear()
    bench.held = 0.0
    times: list[float] = []
    splits: list[list[float]] = []
    marks = Marks(bench.runner.adapters)
    for number in range(args.loads):
        name = f"l{number}"
        write(bench, root / name, 10_000 + number)
        last.clear()
        begin = time.perf_counter()
        bench.store.start_load(name, name, refuse)
        while name not in bench.store._names:
            step()
        taken = time.perf_counter()
        ask(name)
        end = time.perf_counter()
        times.append(end - begin)
        splits.append(marks.split(begin, taken, end))
        for _ in range(args.between):
            step()
        bench.store.unload(name)
    beside = p99(gaps)
    bench.store.unload("there")
    bench.engine.cancel_bridge(NAME)
    while bench.engine.has_work:
        bench.step()
    return report(times, splits, (beside, alone), bench.held, args.streams)


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
        "goal_ms": GOALS["load_ms"],
        "p99_ms": beside,
        "p99_alone_ms": alone,
        "held_ms": 1e3 * held,
        "goal_more": GOALS["between"],
        "split_ms": split,
    }
    print(
        f"load: {row['ms']:.1f} ms from files to the first token (goal {GOALS['load_ms']:.0f}); "
        f"{num_streams} streams meanwhile: p99 between tokens {beside:.1f} ms, "
        f"without loads {alone:.1f} "
        f"({beside / alone - 1:+.0%}; goal {GOALS['between']:+.0%}); held {1e3 * held:.2f} ms\n"
        "  of which " + ", ".join(f"{name} {ms:.1f}" for name, ms in split.items()),
        flush=True,
    )
    return row


def main() -> None:
    """Print both rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-small")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--drawn", type=int, default=64, help="with weights of their own")
    parser.add_argument("--pool", type=int, default=128, help="adapters that fit on the device")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of both, by turns")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--between", type=int, default=20, help="steps before each request")
    parser.add_argument("--loads", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as root:
        bench = Bench(args, root)
        table = {"load": load(bench, Path(root)), "storm": storm(bench)}
    print(json.dumps(vars(args) | {"device": bench.plan.device.type, "table": table}))


if __name__ == "__main__":
    main()
