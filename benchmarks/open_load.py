"""First tokens and times between tokens under open load, of a real engine.

    open_load.py ours OUT [--shape S] [--loads 0.5 0.7 0.9] [--peak R | --at-most R]
    open_load.py vllm OUT --checkpoint DIR --max-num-batched-tokens N ...
    open_load.py compare OLD NEW [--shapes ...] [--seconds 540]

Requests come when they are due (`traces.py`), whatever has been answered; temperature 0.8, top_p
0.95. `--peak` is the rate of which `--loads` are shares; without it, what the engine answers of
requests that come at once, or the rate of `--at-most` if that is less. OUT gets JSON after every
trace, one of each load before the next seed; the same command goes on where it was cut off.
`compare` runs two trees in turns on one machine, as long as the seconds allow, and prints the
ratios of the medians.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from report import commit
from shapes import SHAPES
from traces import FIGURES, Answers, Trace, at_once, trace

HERE = Path(__file__).parent
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
_POLL_S = 0.00005
VOCABULARY = 128_000
SEEDS = (11, 12, 13)


class OpenTarget(Protocol):
    """An engine to which requests can be submitted while it computes."""

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a request."""

    def advance(self, within_s: float) -> list[tuple[int, int]]:
        """Return requests that got tokens, and how many; the next one comes `within_s`."""


class OursTarget:
    """Our engine; it listens for requests as its loop does."""

    def __init__(self, shape: str, budget: int, **options: object) -> None:
        from engine import build

        self._engine = build(shape, "auto", budget, **options)

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return self._engine.has_work

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a request."""
        from slipstream import wire
        from slipstream_contract.ids import pack
        from slipstream_contract.sampling import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, **SAMPLING)
        message = wire.Submit(number, pack(prompt), sampling, time.monotonic_ns())
        self._engine.submit(b"open", message)

    def advance(self, within_s: float) -> list[tuple[int, int]]:
        """Return what a step gave, or nothing if a request comes before it is due."""
        slack_ns = getattr(self._engine, "slack_ns", lambda: 0)()  # older trees have none
        if slack_ns:
            time.sleep(min(slack_ns / 1e9, max(0.0, within_s)))
            if within_s < slack_ns / 1e9:
                return []
        return [
            (each.request, len(each.token_ids)) for each in self._engine.step().get(b"open", ())
        ]


class PeerTarget:
    """vLLM: its engine's process is asked only for what is there, so that no request waits."""

    def __init__(self, checkpoint: Path, budget: int) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        llm = LLM(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=256,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            generation_config="vllm",
        )
        self._engine = llm.llm_engine
        self._queue = self._engine.engine_core.outputs_queue
        self._round = 0
        self._sampling = lambda max_tokens: SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **SAMPLING,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._engine.has_unfinished_requests())

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a request, under a name that was never used."""
        self._round += 1
        name = f"{number}-{self._round}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(max_tokens))

    def advance(self, within_s: float) -> list[tuple[int, int]]:
        """Return what has come, if anything has."""
        if self._queue.empty():
            time.sleep(min(_POLL_S, max(0.0, within_s)))
            return []
        outputs = self._engine.step()
        return [(int(o.request_id.split("-")[0]), len(o.outputs[0].token_ids)) for o in outputs]


def run(target: OpenTarget, load: Trace) -> Answers:
    """Run a trace to its end; every request must get all its tokens."""
    rng = np.random.default_rng(load.seed)
    prompts = [rng.integers(0, VOCABULARY, each.num_input).tolist() for each in load.arrivals]
    answers, arrivals, sent = Answers(load), load.arrivals, 0
    begin = time.perf_counter()
    while sent < len(arrivals) or target.is_busy:
        now = time.perf_counter() - begin
        while sent < len(arrivals) and arrivals[sent].due_s <= now:
            target.submit(sent, prompts[sent], arrivals[sent].num_output)
            sent += 1
        left_s = arrivals[sent].due_s - now if sent < len(arrivals) else float("inf")
        if not target.is_busy:
            time.sleep(max(0.0, min(left_s, 0.0005)))
            continue
        for number, count in target.advance(left_s):
            answers.times[number] += [time.perf_counter() - begin] * count
    counts = [len(times) for times in answers.times]
    assert counts == [each.num_output for each in arrivals], "tokens are missing"
    return answers


def shortened(load: Trace, divisor: int) -> Trace:
    """Return a trace with a part of its tokens, for machines without a GPU."""
    arrivals = tuple(
        replace(
            each,
            num_input=max(1, each.num_input // divisor),
            num_output=max(1, each.num_output // divisor),
        )
        for each in load.arrivals
    )
    return replace(load, arrivals=arrivals)


class Record:
    """What one engine reached, in a file that is written after each figure.

    Attributes:
        data: `engine`, `shape` and the like; `peak`, where it was measured; `rate`, of which loads
            are shares, in requests a second; `loads`: by share, the figures of each seed.

    Raises SystemExit where the file has figures of another run.
    """

    def __init__(self, path: Path, facts: Mapping[str, object]) -> None:
        self._path = path
        self.data: dict[str, Any] = dict(facts) | {"loads": {}}
        if path.is_file():
            self.data = json.loads(path.read_text())
            if not facts.items() <= self.data.items():
                raise SystemExit(f"{path} has figures of another run; name a new file")

    def put(self, **values: object) -> None:
        """Keep values."""
        self.data |= values
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")

    def set_rate(self, rate: float) -> None:
        """Keep the rate; raises SystemExit where there are figures at another."""
        if self.data["loads"] and self.data["rate"] != rate:
            raise SystemExit(f"{self._path} has figures of another rate; name a new file")
        self.put(rate=rate)

    def has(self, load: float, seed: int) -> bool:
        """Return whether there are figures of a trace."""
        return any(row["seed"] == seed for row in self.data["loads"].get(f"{load:g}", ()))

    def add(self, load: float, seed: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a trace."""
        self.data["loads"].setdefault(f"{load:g}", []).append({"seed": seed, **figures})
        self.put()


def measure(target: OpenTarget, args: argparse.Namespace, record: Record) -> None:
    """Run the peak, if it is not known, and every load and seed that the record lacks."""
    whole = shortened(at_once(count=args.count), args.shorten)
    run(target, replace(whole, arrivals=whole.arrivals[: max(4, args.count // 4)]))
    rate = args.peak
    if rate is None:
        if "peak" not in record.data:
            record.put(peak=run(target, whole).peak)
        rate = min(record.data["peak"], args.at_most)
    record.set_rate(rate)
    print(f"{record.data['engine']}: loads are shares of {rate:.2f} requests/s", flush=True)
    for seed in args.seeds:
        for load in args.loads:
            if record.has(load, seed):
                continue
            each = shortened(trace("poisson", load * rate, seed, args.count), args.shorten)
            figures = run(target, each).figures()
            record.add(load, seed, figures)
            print(f"open-{100 * load:.0f} seed {seed} {figures}", flush=True)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in FIGURES}


def side(args: argparse.Namespace) -> int:
    """Measure one engine; what the file has of it is not measured again."""
    budget = args.max_num_batched_tokens
    facts = {"engine": args.action, "shape": args.shape, "budget": budget}
    facts |= {"count": args.count, "shorten": args.shorten, "commit": commit()}
    record = Record(args.output, facts)
    if args.action == "ours":
        target: OpenTarget = OursTarget(args.shape, budget)
    else:
        target = PeerTarget(args.checkpoint, budget)
    measure(target, args, record)
    return 0


def child(tree: Path, shape: str, peak: float | None, args: argparse.Namespace) -> dict[str, Any]:
    """Measure our engine of a tree, by this tree's scripts; {} if it failed."""
    from compare import PACKAGES

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / p) for p in PACKAGES)}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        output = Path(folder) / "open.json"
        command = [sys.executable, __file__, "ours", str(output), "--shape", shape]
        command += ["--count", str(args.count), "--seeds", *map(str, args.seeds)]
        command += ["--loads", *map(str, args.loads), "--shorten", str(args.shorten)]
        if peak is not None:
            command += ["--peak", str(peak)]
        subprocess.run(command, env=environment, check=False)
        return json.loads(output.read_text()) if output.is_file() else {}


def compare(args: argparse.Namespace) -> int:
    """Run two trees in turns; each shape once, then again while there is time."""
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    begin, longest = time.monotonic(), 0.0
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        shape: {name: [] for name in trees} for shape in args.shapes
    }
    peaks: dict[str, float] = {}
    for turn in range(args.turns):
        for shape in args.shapes:
            since = time.monotonic()
            if since - begin + longest > args.seconds:
                break
            for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                print(f"== {shape}, {name}, turn {turn + 1}", flush=True)
                result = child(trees[name], shape, peaks.get(shape), args)
                if "rate" in result:
                    peaks.setdefault(shape, result["rate"])
                    found[shape][name].append(result)
            longest = max(longest, time.monotonic() - since)
    is_whole = True
    print(f"{'new over old':28}" + "".join(f"{name:>13}" for name in FIGURES))
    for shape, sides in found.items():
        for load in map("{:g}".format, args.loads):
            rows = {n: [r for o in s for r in o["loads"].get(load, ())] for n, s in sides.items()}
            if not all(rows.values()):
                is_whole = False
                continue
            old, new = (medians(rows[name]) for name in trees)
            shown = "".join(f"{new[name] / old[name]:13.3f}" for name in FIGURES)
            print(f"{shape + ' ' + load:28}{shown}")
    print(json.dumps({"peaks": peaks, "found": found}))
    return 0 if is_whole else 1


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("ours", "vllm", "compare"):
        action = actions.add_parser(name)
        action.add_argument("--count", type=int, default=300, help="requests of a trace")
        action.add_argument("--shorten", type=int, default=1, help="divide all lengths by N")
        action.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
        action.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.7, 0.9])
        if name == "compare":
            action.add_argument("old", type=Path)
            action.add_argument("new", type=Path)
            shapes = ["llama-3.1-8b", "llama-3.2-1b", "llama-14b"]
            action.add_argument("--shapes", nargs="+", default=shapes, choices=SHAPES)
            action.add_argument("--turns", type=int, default=4, help="at most")
            action.add_argument("--seconds", type=float, default=500, help="no turn begins later")
            action.set_defaults(count=200, seeds=[SEEDS[0]], loads=[0.7])
            continue
        action.add_argument("output", type=Path)
        action.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
        rate = action.add_mutually_exclusive_group()
        rate.add_argument("--peak", type=float, help="requests a second, of which loads are shares")
        rate.add_argument("--at-most", type=float, default=math.inf, help="of them, if it has more")
        action.add_argument("--max-num-batched-tokens", type=int, default=2048)
        if name == "vllm":
            action.add_argument("--checkpoint", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    """The exit code."""
    from timing import need_gpu

    args = parse()
    if args.action == "compare":
        need_gpu(*args.shapes)
        return compare(args)
    if args.action == "ours":
        need_gpu(args.shape)
    return side(args)


if __name__ == "__main__":
    sys.exit(main())
