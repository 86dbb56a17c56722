"""What the host takes to launch a step that is no CUDA graph: `python benchmarks/launches.py`.

Steps of 600, 2,048 and 8,192 tokens of a prompt, and of 600 decodes: for each the least and the
median of milliseconds that the host launches, and of the device's part, which the host does not
wait for; and what the host takes for a number of tokens that it has not seen. Blocks are repeated
(`fuse/repeat.py`) and, beside that, launched one by one, in turns.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from engine import build
from parts import batch_of
from shapes import SHAPES
from slipstream.core.batch import Batch
from slipstream.layers.decoder import one_by_one
from timing import need_gpu

BUDGET, MAX_SEQS = 8192, 640
CASES = {  # decodes, tokens of each that are cached, tokens of a prompt
    "600 tokens": (0, 0, 600),
    "2,048 tokens": (0, 0, 2048),
    "8,192 tokens": (0, 0, 8192),
    "600 decodes": (600, 64, 0),
    "64 decodes, 1,000 tokens": (64, 256, 1000),
}
WAYS = ("one by one", "repeated")


def launched(runner: Any, batch: Batch) -> tuple[float, float]:
    """Return the host's milliseconds of a launch, and those until the device has run it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step = runner.launch(batch)
    host = time.perf_counter() - begin
    step.wait()
    return 1e3 * host, 1e3 * (time.perf_counter() - begin)


def measure(runner: Any, case: tuple[int, int, int], tries: int) -> dict[str, dict[str, float]]:
    """Launch a step so often in each way, in turns; the least and the median of each."""
    decodes, cached, prompt = case
    ways = dict(zip(WAYS, (one_by_one, runner._model.in_turn), strict=True))
    batch = batch_of(runner, *case)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    new: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(tries):
        for turn, (way, apply) in enumerate(ways.items()):
            runner._model.in_turn = apply
            launched(runner, batch)  # all is chosen and loaded
            times[way].append(launched(runner, batch))
            less = 2 * number + turn + 1  # of a number that has not been
            other = (decodes, cached, prompt - less) if prompt else (decodes - less, cached, 0)
            if number < 8:
                new[way].append(launched(runner, batch_of(runner, *other))[0])
    runner._model.in_turn = ways["repeated"]
    return {way: figures(times[way], new[way]) for way in ways}


def figures(times: list[tuple[float, float]], new: list[float]) -> dict[str, float]:
    """Return the figures of a way, in milliseconds."""
    host, whole = ([each[i] for each in times] for i in (0, 1))
    return {
        "least": round(min(host), 3),
        "median": round(statistics.median(host), 3),
        "new": round(statistics.median(new), 3),
        "whole": round(statistics.median(whole), 3),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "llama-3.2-1b"])
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    assert set(args.shapes) <= SHAPES.keys(), f"shapes are {[*SHAPES]}"
    need_gpu()
    found = {}
    for shape in args.shapes:
        options = {"quantization": args.quantization, "max_num_seqs": MAX_SEQS}
        options |= {"cuda_graphs": False}
        runner: Any = build(shape, "auto", BUDGET, **options)._runner
        for name, case in CASES.items():
            found[f"{shape}, {name}"] = ways = measure(runner, case, args.repeat)
            for way, each in ways.items():
                shown = ", ".join(f"{key} {value:7.3f}" for key, value in each.items())
                print(f"{shape:14} {name:26} {way:12} {shown} ms", flush=True)
        del runner
        torch.cuda.empty_cache()
    print(json.dumps({"device": torch.cuda.get_device_name(), "steps": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
