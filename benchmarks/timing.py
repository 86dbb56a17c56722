"""How a kernel is timed: graph replays over inputs that together exceed the L2 cache, medians."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

LIMITS = {"NVIDIA H200": (4.707e12, 790e12)}  # bytes/s read, bf16 FLOP/s
HIDDEN, FFN, Q_HEADS, KV_HEADS, HEAD_SIZE, VOCAB, BLOCK = 4096, 14336, 32, 8, 128, 128256, 32
DTYPE = torch.bfloat16
ROTATION = 256 << 20  # bytes of inputs to walk through, several times the L2 cache


@dataclass
class Result:
    """One line of the table."""

    kernel: str
    case: str
    microseconds: float
    gigabytes_per_s: float
    teraflops: float
    share_of_limit: float | None


def time_graph(runs: list[Callable[[], object]], replays: int = 15) -> float:
    """Median seconds of one run, all of them captured in one graph."""
    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays + 3)]
    for start, end in events:  # none waits for the one before: the device never idles
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e-3 / len(runs) for start, end in events]
    return sorted(times[3:])[replays // 2]


def measure(
    kernel: str, case: str, make: Callable[[], Callable[[], object]], num_bytes: float, flops: float
) -> Result:
    """Time what `make` returns, made as often as its bytes need to exceed the L2 cache."""
    copies = max(4, min(64, math.ceil(ROTATION / num_bytes)))
    return report(kernel, case, [make() for _ in range(copies)], num_bytes, flops)


def report(
    kernel: str, case: str, runs: list[Callable[[], object]], num_bytes: float, flops: float
) -> Result:
    """Time `runs`, which are alike; bytes and operations are of one of them."""
    seconds = time_graph(runs)
    limits = LIMITS.get(torch.cuda.get_device_name())
    share = max(num_bytes / limits[0], flops / limits[1]) / seconds if limits else None
    result = Result(
        kernel, case, seconds * 1e6, num_bytes / seconds / 1e9, flops / seconds / 1e12, share
    )
    shown = "-" if share is None else f"{share:6.1%}"
    print(
        f"{kernel:18} {case:26} {result.microseconds:10.2f} us {result.gigabytes_per_s:8.0f} GB/s "
        f"{result.teraflops:7.1f} TFLOP/s {shown:>7}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return result


def need_gpu(*shapes: str) -> None:
    """End with exit code 2, and one line, on a machine without a GPU.

    The shape `tiny` alone, of those that are to be measured, needs none.
    """
    if set(shapes) == {"tiny"}:
        return
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]}: torch sees no GPU on this machine", file=sys.stderr)
        sys.exit(2)


def rows(*shape: int) -> torch.Tensor:
    """Random rows on the GPU."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)
