"""Where the time of a step goes: `python benchmarks/parts.py [--fp8] [CASE ...]`.

Steps of the GPU table's rows, each as one CUDA graph under steady load: whole, and then without one
of its parts at a time. What a part costs is what the step lacks without it; parts that overlap
cost less together than one by one, and what no part accounts for is the matrices of the blocks.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from engine import build
from slipstream.core.batch import Batch, Row
from slipstream.kernels.gemm import linear
from slipstream.layers.attention import Attention
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.step_shape import StepShape
from slipstream_contract.ids import TokenIds
from slipstream_contract.sampling import SamplingParams
from timing import need_gpu
from workloads import VOCABULARY

SECONDS = 0.7  # of load; in the first third clocks fall to what power allows: it does not count
CASES = {  # sequences, tokens of each that are cached; tokens of a prompt
    "decode-bs1": (1, 256, 0),
    "decode-bs32": (32, 256, 0),
    "decode-bs128": (128, 256, 0),
    "decode-bs256": (256, 192, 0),
    "ttft": (0, 0, 128),
    "prefill": (0, 0, 2048),
    "long-context": (16, 16_384, 0),
}


def batch_of(runner: ModelRunner, decodes: int, cached: int, prompt: int) -> Batch:
    """Greedy rows whose blocks lie anywhere in the cache."""
    rng = np.random.default_rng(0)
    free = iter(rng.permutation(runner.num_blocks).tolist())
    sampling = SamplingParams(max_tokens=8, temperature=0.0)

    def row(slot: int, count: int, start: int) -> Row:
        ids = TokenIds("i", rng.integers(0, VOCABULARY, count).tolist())
        blocks = [next(free) for _ in range(-(-(start + count) // runner.block_size))]
        return Row(slot, slot, ids, start, (blocks,), True, sampling, 0, 1)

    rows = [row(slot, 1, cached) for slot in range(decodes)]
    rows += [row(decodes, prompt, 0)] if prompt else []
    return Batch(tuple(rows), decodes)


def shape_of(runner: Any, batch: Batch) -> StepShape:
    """In which the engine would run it."""
    exact: StepShape = runner._builder.layout.shape_of(batch)
    return runner._graphs._buckets.find(exact) or exact


def graph_of(runner: Any, batch: Batch) -> torch.cuda.CUDAGraph:
    """The step, as the engine would run it."""
    shape = shape_of(runner, batch)
    arrays = runner._builder.build(batch, shape, 0, 0)
    with torch.inference_mode():
        inputs = runner._stage(arrays)
        runner._step(shape, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner._step(shape, inputs)
    return graph


def milliseconds(replay: Callable[[], None]) -> float:
    """Time one replay under steady load."""
    replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    replay()
    torch.cuda.synchronize()
    count = max(6, int(SECONDS / (time.perf_counter() - began)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for i in range(count):
        if i == count // 3:
            events[0].record()
        replay()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / (count - count // 3)


@contextmanager
def without(runner: Any, part: str, num_rows: int) -> Iterator[None]:
    """Steps of so many tokens made meanwhile lack the part; random numbers are in its place."""
    model = runner._model
    weight, size = model.norm.weight, model.blocks[0].attention.head_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=weight.device, dtype=weight.dtype)

    if part == "attention":
        heads = random(num_rows, len(weight) // size, size)
        patch = mock.patch.object(Attention, "_attend", lambda _, q, *rest: heads[: len(q)])
    elif part == "norms":
        normed = random(num_rows, len(weight))
        patch = mock.patch.object(linear, "rms_norm", lambda x, *_: normed[: len(x)])
    elif part == "gate":
        patch = mock.patch.dict(linear.GATES, silu=lambda x: x[:, : x.shape[1] // 2])
    elif part == "draw":
        patch = mock.patch("slipstream.runner.model_runner.sample_tokens")
    else:
        logits = random(num_rows, runner.vocab_size)
        patch = mock.patch.object(model, "head", lambda _, x: logits[: len(x)])
    with patch:
        yield


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--shape", default="llama-3.1-8b")
    args = parser.parse_args()
    need_gpu()
    options = {"quantization": "fp8"} if args.fp8 else {}
    runner = build(args.shape, "auto", 4096, **options)._runner
    parts = ["attention", "draw", "head"] + ([] if args.fp8 else ["norms", "gate"])
    for case in args.cases:
        decodes, cached, prompt = CASES[case]
        batch = batch_of(runner, decodes, cached, prompt)
        whole = milliseconds(graph_of(runner, batch).replay)
        costs = {}
        for part in parts:
            with without(runner, part, shape_of(runner, batch).num_tokens):
                costs[part] = whole - milliseconds(graph_of(runner, batch).replay)
        rest = whole - sum(costs.values())
        shown = ", ".join(f"{part} {cost:.3f}" for part, cost in costs.items())
        print(f"{case:14} {whole:8.3f} ms: {shown}, the rest {rest:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
