"""Products of many rows at Llama-3.1-8B's matrices: torch, cuBLASLt's guess, and what was tuned.

`slipstream tune` goes first. Products one by one come from graphs of few launches; `chain` is what
a step sees: 32 layers of four products each and the head, in one graph, the three in turns over
half a second each, so that they meet the same clocks.
"""

import functools
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from slipstream.kernels.gemm import cublaslt
from timing import (
    DTYPE,
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
SUSTAINED_S, TURN_S = 0.5, 0.05
FP8 = torch.float8_e4m3fn

# Of x and a matrix; where there is a residual sum, added to it.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], object]


def by_torch(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    if residual is not None:
        return residual.addmm_(x, weight.t())
    if x.dtype != FP8:
        return torch.mm(x, weight.t())
    one = _one()
    options = {"scale_a": one, "scale_b": one, "out_dtype": DTYPE, "use_fast_accum": True}
    return torch._scaled_mm(x, weight.t(), **options)


def by_cublaslt(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    return cublaslt.matmul(x, weight, residual, residual is not None)


def is_added(weight: torch.Tensor) -> bool:
    """To the residual sum: what `o` and `down` make; of e4m3 it is to be scaled first."""
    return weight.dtype == DTYPE and len(weight) == HIDDEN


@functools.cache
def _one() -> torch.Tensor:
    return torch.ones((), device="cuda")


@contextmanager
def untuned() -> Iterator[None]:
    """Run without tuned kernels."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty
        cublaslt.discard_plans()
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
            cublaslt.discard_plans()


def single() -> list[Result]:
    results = []
    for n in ROWS:
        for name, (outputs, inputs) in MATRICES.items():

            def make(
                n: int = n, outputs: int = outputs, inputs: int = inputs
            ) -> Callable[[], object]:
                x, weight = rows(n, inputs), rows(outputs, inputs)
                residual = rows(n, outputs) if is_added(weight) else None
                return lambda: by_cublaslt(x, weight, residual)

            size = outputs * inputs
            results.append(
                measure("cublaslt", f"{name} {n}", make, 2 * size, 2 * size * n),
            )
    return results


def captured(
    product: Product, weights: list[torch.Tensor], inputs: dict[object, torch.Tensor]
) -> torch.cuda.CUDAGraph:
    """One step's products; `inputs`, by width and type, must outlive the graph."""
    residual = inputs["residual"]

    def step() -> None:
        for weight in weights:
            x = inputs[weight.shape[1], weight.dtype]
            product(x, weight, residual if is_added(weight) else None)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replays(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Seconds of each replay of one turn."""
    times: list[float] = []
    while sum(times) < TURN_S:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        for event in events:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]
    return times


def chain(dtype: torch.dtype = DTYPE, wanted: Sequence[int] = ROWS) -> list[Result]:
    """One step's products by each of the three; matrices of layers are of `dtype`."""
    layer = [*MATRICES.values()][:4]
    weights = [rows(*shape).to(dtype) for _ in range(NUM_LAYERS) for shape in layer]
    weights.append(rows(*MATRICES["head"]))
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    limits = LIMITS.get(torch.cuda.get_device_name())
    results = []
    for n in wanted:
        # Drawn, so that they cost the power of real ones.
        kinds = {(weight.shape[1], weight.dtype) for weight in weights}
        inputs: dict[object, torch.Tensor] = {"residual": rows(n, HIDDEN)}
        inputs |= {kind: rows(n, kind[0]).to(kind[1]) for kind in kinds}
        graphs = {"torch": captured(by_torch, weights, inputs)}
        with untuned():
            graphs["default"] = captured(by_cublaslt, weights, inputs)
        graphs["tuned"] = captured(by_cublaslt, weights, inputs)
        times: dict[str, list[float]] = {kind: [] for kind in graphs}
        while sum(times["torch"]) < SUSTAINED_S:
            for kind, graph in graphs.items():
                times[kind] += replays(graph)
        flops = 2 * n * sum(weight.numel() for weight in weights)
        for kind, taken in times.items():
            seconds = statistics.median(taken[len(taken) // 4 :])
            # Twice the operations in fp8.
            busy = flops / (limits[1] * (2 if dtype == FP8 else 1)) if limits else 0
            share = max(num_bytes / limits[0], busy) / seconds if limits else None
            rates = (num_bytes / seconds / 1e9, flops / seconds / 1e12)
            case = f"{str(dtype).removeprefix('torch.')} {n} {kind}"
            results.append(Result("chain", case, seconds * 1e6, *rates, share))
            shown = "-" if share is None else f"{share:6.1%}"
            print(f"chain {case:28} {seconds * 1e3:8.3f} ms {shown}", flush=True)
    return results


def cases() -> list[Result]:
    return [*single(), *chain(), *chain(FP8)]
