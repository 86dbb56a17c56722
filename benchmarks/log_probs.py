"""Log probs beside tokens: `python benchmarks/log_probs.py [--shape S] [--output FILE]`.

The same greedy requests, all decoding together over random weights, offline: none wants log probs,
all want 5, all want 20, all want 5 processed ones. Then one long prompt, without and with its log
probs: the time, and the device memory at its peak beyond that of the prompt alone. Prints one JSON
object; the goals are a loss of at most 5 % with 5 log probs, and 256 MiB. What none wanting costs
is the `none` of this commit beside that of another.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import workloads
from engine import build
from shapes import SHAPES
from slipstream import wire
from slipstream.engine.engine import Engine
from slipstream_contract.ids import pack
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.sampling import SamplingParams

GOALS = {"all_5": 0.95, "prompt_mib": 256}
SIDES = {
    "none": None,
    "all_5": LogProbs(top=5),
    "all_20": LogProbs(top=20),
    "all_5_processed": LogProbs(top=5, mode="processed_logprobs"),
}


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[float]:
    """Offer everything at once, step until all is done; the time of each step in ms.

    No prompt is in the cache. What a step has to send is encoded, as the engine's loop does.
    """
    salt = str(engine.num_steps)
    for number, prompt in enumerate(prompts):
        now_ns = time.monotonic_ns()
        message = wire.Submit(number, pack(prompt), sampling, now_ns, cache_salt=salt)
        engine.submit(b"bench", message)
    ends = [(time.perf_counter(), engine.num_steps)]
    while engine.has_work:
        for tokens in engine.step().values():
            wire.encode(wire.StepOutputs(engine.num_steps, 0, tokens))
        if engine.num_steps > ends[-1][1]:
            ends.append((time.perf_counter(), engine.num_steps))
    return [(b[0] - a[0]) * 1e3 for a, b in pairwise(ends)]


def decode_ms(
    engine: Engine, prompts: list[list[int]], values: LogProbs | None, most: int
) -> float:
    """Median time of a step of decodes alone."""
    sampling = SamplingParams(max_tokens=most, temperature=0.0, values=values)
    times = run(engine, prompts, sampling)
    return statistics.median(times[len(times) // 2 : -2])  # prompts are computed before


def of_prompt(engine: Engine, length: int, values: LogProbs | None) -> dict[str, float]:
    """Seconds and peak memory of one prompt."""
    prompt = workloads.prefill(1, length).prompts
    sampling = SamplingParams(max_tokens=1, temperature=0.0, values=values)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = sum(run(engine, prompt, sampling)) / 1e3
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"seconds": seconds, "peak_mib": peak / 2**20}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-input", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    engine = build(args.shape, "auto", 4096)
    prompts = workloads.decode(args.batch, num_input=args.num_input).prompts
    decode_ms(engine, prompts, None, args.max_tokens)  # warms up
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(args.repeat):  # by turns, so that a change of clocks meets all
        for name, values in SIDES.items():
            times[name].append(decode_ms(engine, prompts, values, args.max_tokens))
    steps = {name: statistics.median(each) for name, each in times.items()}
    of_prompt(engine, args.prompt, None)
    plain = of_prompt(engine, args.prompt, None)
    with_values = of_prompt(engine, args.prompt, LogProbs(prompt=5))
    result: dict[str, Any] = {
        "shape": args.shape,
        "batch": args.batch,
        "max_tokens": args.max_tokens,
        "num_input": args.num_input,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "step_ms": {name: round(each, 3) for name, each in steps.items()},
        "speed": {name: round(steps["none"] / each, 4) for name, each in steps.items()},
        "prompt": {"tokens": args.prompt, "plain": plain, "log_probs": with_values},
        "prompt_mib": round(with_values["peak_mib"] - plain["peak_mib"], 1),
        "goals": GOALS,
    }
    print(json.dumps(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
