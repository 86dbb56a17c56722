"""Beams beside as many plain rows: `python benchmarks/beams.py [--shape S] [--output FILE]`.

16 searches of 4 beams against 64 greedy requests, offline, over random weights. A step of either
has 64 rows; beams also need the likeliest tokens of each row, the choice among them, forks, and
that a step is over before the next one is launched. Prints one JSON object: the median time of a
step, tokens a second of both, and their ratio, for which 0.70 is the goal.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import workloads
from engine import build
from shapes import SHAPES
from slipstream import wire
from slipstream.engine.engine import Engine
from slipstream_contract.beams import Beams
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

GOAL = 0.70


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> dict[str, float]:
    """Offer everything at once, step until all is done; times in ms."""
    for number, prompt in enumerate(prompts):
        message = wire.Submit(number, pack(prompt), sampling, time.monotonic_ns())
        engine.submit(b"bench", message)
    ends = [(time.perf_counter(), engine.num_steps)]
    while engine.has_work:
        engine.step()
        if engine.num_steps > ends[-1][1]:
            ends.append((time.perf_counter(), engine.num_steps))
    times = [(b[0] - a[0]) * 1e3 for a, b in pairwise(ends)]
    decodes = times[len(times) // 4 : -2]  # prompts are computed before
    return {"step_ms": statistics.median(decodes), "seconds": ends[-1][0] - ends[0][0]}


def measure(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams, repeat: int
) -> dict[str, float]:
    """Medians over `repeat` runs, after one that warms up."""
    run(engine, prompts, sampling)
    runs = [run(engine, prompts, sampling) for _ in range(repeat)]
    return {name: statistics.median([each[name] for each in runs]) for name in runs[0]}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-input", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    engine = build(args.shape, "auto", 4096)
    num_rows = args.batch * args.width
    prompts = workloads.decode(num_rows, num_input=args.num_input).prompts
    most = args.max_tokens
    plain = SamplingParams(max_tokens=most, temperature=0.0)
    search = SamplingParams(
        max_tokens=most, temperature=0.0, n=args.width, beams=Beams(width=args.width)
    )
    sides = {
        "plain": measure(engine, prompts, plain, args.repeat),
        "beams": measure(engine, prompts[: args.batch], search, args.repeat),
    }
    for side in sides.values():
        side["tok_s"] = num_rows / side["step_ms"] * 1e3
    ratio = sides["beams"]["tok_s"] / sides["plain"]["tok_s"]
    about = {
        "shape": args.shape,
        "batch": args.batch,
        "width": args.width,
        "max_tokens": most,
        "num_input": args.num_input,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    result = {**about, **sides, "ratio": round(ratio, 3), "goal": GOAL}
    print(json.dumps(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
