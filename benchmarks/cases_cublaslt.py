"""Products of many rows at Llama-3.1-8B's matrices: torch, cuBLASLt's guess, and what was tuned.

`slipstream tune` goes first. Products one by one come from graphs of few launches; `chain` is what
a step sees: 32 layers of four products each and the head, in one graph, over half a second.
"""

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from slipstream.kernels import cublaslt
from timing import (
    FFN,
    HEAD_SIZE,
    HIDDEN,
    KV_HEADS,
    LIMITS,
    Q_HEADS,
    VOCAB,
    Result,
    measure,
    rows,
)

MATRICES = {  # name -> outputs, inputs
    "qkv": ((Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE, HIDDEN),
    "o": (HIDDEN, Q_HEADS * HEAD_SIZE),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (VOCAB, HIDDEN),
}
NUM_LAYERS = 32
ROWS = (8, 16, 32, 64, 128, 256, 512)
SUSTAINED_S = 0.5

Product = Callable[[torch.Tensor, torch.Tensor], object]


def by_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t())


@contextmanager
def untuned() -> Iterator[None]:
    """As if nobody had tuned."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty
        cublaslt.forget()
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
            cublaslt.forget()


def single() -> list[Result]:
    results = []
    for n in ROWS:
        for name, (outputs, inputs) in MATRICES.items():

            def make(
                n: int = n, outputs: int = outputs, inputs: int = inputs
            ) -> Callable[[], object]:
                x, weight = rows(n, inputs), rows(outputs, inputs)
                return lambda: cublaslt.matmul(x, weight)

            size = outputs * inputs
            results.append(
                measure("cublaslt", f"{name} {n}", make, 2 * size, 2 * size * n),
            )
    return results


def captured(product: Product, weights: list[list[torch.Tensor]], n: int) -> torch.cuda.CUDAGraph:
    """One step's products; inputs are drawn, so that they cost the power of real ones."""
    inputs = {width: rows(n, width) for width in {w.shape[1] for layer in weights for w in layer}}

    def step() -> None:
        for layer in weights:
            for weight in layer:
                product(inputs[weight.shape[1]], weight)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def sustained(graph: torch.cuda.CUDAGraph) -> float:
    """Median seconds of a replay in the second half of `SUSTAINED_S`."""
    times: list[float] = []
    while sum(times) < SUSTAINED_S:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
        for event in events:
            event.record()
            graph.replay()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]
    return statistics.median(times[len(times) // 2 :])


def chain() -> list[Result]:
    layers = [[*MATRICES.values()][:4]] * NUM_LAYERS + [[MATRICES["head"]]]
    weights = [[rows(*shape).mul_(shape[1] ** -0.5) for shape in layer] for layer in layers]
    size = sum(weight.numel() for layer in weights for weight in layer)
    limits = LIMITS.get(torch.cuda.get_device_name())
    results = []
    for n in ROWS:
        graphs = {"torch": captured(by_torch, weights, n)}
        with untuned():
            graphs["default"] = captured(cublaslt.matmul, weights, n)
        graphs["tuned"] = captured(cublaslt.matmul, weights, n)
        for kind, graph in graphs.items():
            seconds = sustained(graph)
            share = (
                max(2 * size / limits[0], 2 * size * n / limits[1]) / seconds if limits else None
            )
            rates = (2 * size / seconds / 1e9, 2 * size * n / seconds / 1e12)
            results.append(Result("chain", f"{kind} {n}", seconds * 1e6, *rates, share))
            shown = "-" if share is None else f"{share:6.1%}"
            print(f"chain {n:4} {kind:8} {seconds * 1e3:8.3f} ms {shown}", flush=True)
    return results


def cases() -> list[Result]:
    return [*single(), *chain()]
