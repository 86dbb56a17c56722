"""The engine alone on the shared workloads: `python benchmarks/engine.py [--shape S] [NAME ...]`.

Weights are random (speed does not depend on them), prompts are token ids, sampling is greedy.
Prints one JSON line per workload and writes them to `--output`. Times are wall clock around
`Engine.step`, the median over `--repeat` runs with the spread beside it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import workloads
from shapes import SHAPES, write_config
from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.plan import resolve
from slipstream.engine.runner import ModelRunner
from slipstream.engine.scheduler import Limits
from slipstream_contract.sampling import SamplingParams
from workloads import Workload

WORKLOADS = {
    "decode_1": lambda: workloads.decode(1),
    "decode_32": lambda: workloads.decode(32),
    "decode_128": lambda: workloads.decode(128),
    "decode_256": lambda: workloads.decode(256, max_tokens=128),
    "prefill": workloads.prefill,
    "mixed": workloads.mixed,
    "long_context": workloads.long_context,
}


def run(engine: Engine, workload: Workload) -> dict[str, float]:
    """One run: submit everything, step until it is done.

    `itl_median_ms` is over the steps in which every sequence got its one token.
    """
    events: list[tuple[float, int]] = []
    start = time.perf_counter()
    for number, prompt in enumerate(workload.prompts):
        sampling = SamplingParams(
            max_tokens=workload.max_tokens, min_tokens=workload.max_tokens, temperature=0.0
        )
        engine.submit(b"bench", wire.Submit(number, prompt, sampling, time.time_ns()))
    remaining = len(workload.prompts)
    while remaining:
        outputs = engine.step().get(b"bench", [])
        num_tokens = sum(len(entry.token_ids) for entry in outputs)
        remaining -= sum(entry.finished is not None for entry in outputs)
        if num_tokens:
            events.append((time.perf_counter(), num_tokens))
    seconds = time.perf_counter() - start
    full = len(workload.prompts)
    gaps = [(b[0] - a[0]) * 1e3 for a, b in pairwise(events) if a[1] == b[1] == full]
    num_output = sum(count for _, count in events)
    itl = {"itl_median_ms": statistics.median(gaps)} if gaps else {}
    return itl | {
        "ttft_ms": (events[0][0] - start) * 1e3,
        "seconds": seconds,
        "input_tok_s": sum(map(len, workload.prompts)) / seconds,
        "output_tok_s": num_output / seconds,
    }


def measure(engine: Engine, workload: Workload, repeat: int) -> dict[str, object]:
    """Median, minimum and maximum of every figure over `repeat` runs, after one warm-up."""
    run(engine, workload)
    runs = [run(engine, workload) for _ in range(repeat)]
    figures = {
        key: {
            "median": round(statistics.median(r[key] for r in runs), 3),
            "min": round(min(r[key] for r in runs), 3),
            "max": round(max(r[key] for r in runs), 3),
        }
        for key in runs[0]
    }
    return {"workload": workload.name, "requests": len(workload.prompts), **figures}


def build(shape: str, dtype: str, max_num_batched_tokens: int) -> Engine:
    """An engine over random weights of the given shape."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        write_config(shape, Path(directory))
        config = EngineConfig(
            checkpoint=directory,
            dtype=dtype,
            load_format="random",
            max_num_batched_tokens=max_num_batched_tokens,
        )
        runner = ModelRunner(resolve(config))
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, config.max_waiting)
    return Engine(limits, runner, None, shape)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    engine = build(args.shape, args.dtype, args.max_num_batched_tokens)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head = {
        "engine": "slipstream",
        "shape": args.shape,
        "device": device,
        "torch": torch.__version__,
    }
    rows: list[dict[str, object]] = [{**head, "start_s": round(time.perf_counter() - started, 1)}]
    print(json.dumps(rows[0]), flush=True)
    for name in args.names:
        rows.append(measure(engine, WORKLOADS[name](), args.repeat))
        print(json.dumps(rows[-1]), flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    sys.exit(main())
