"""Products with weights of 4 or 8 bits beside those with 16, at Llama-3.1-8B's matrices.

    PYTHONPATH=backend python benchmarks/weights4.py [--bits 4] [--group 128] [--zeros] [--rows 1 8]

Random weights; each product runs in a graph over several copies that together exceed the L2 cache,
for a third of a second. The limit of a product is its bytes over what this GPU reads, or its
operations over what it multiplies in 16 bits, whichever takes longer; both are measured first.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from ceilings import read_bandwidth
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import PLAIN, Matrix, gemm, spec_of
from slipstream.kernels.gemm.packing import BLOCK, TILE, Groups, Packing
from timing import DTYPE, ROTATION

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # inputs, outputs
ROWS = (1, 8, 16, 32, 64, 128, 256, 2048)
STEADY_S, WARM_S = 0.3, 0.05
LARGE = 8192  # of the products that show what the GPU multiplies


def random_packed(made: Packing) -> Matrix:
    """Return weights of random codes, in the order of the kernels as they are."""
    words = made.blocks * BLOCK * TILE * made.bits // 32
    values = torch.randint(-(1 << 31), 1 << 31, (made.tiles, words), device="cuda")
    shape = (made.tiles, made.groups, TILE)
    scales = torch.rand(shape, device="cuda") / made.inputs**0.5 / (1 << made.bits - 2)
    middle = 1 << made.bits - 1
    zeros = torch.randint(middle - 3, middle + 3, shape, device="cuda").to(torch.uint8)
    packed_scales = scales.to(made.scale)
    groups = Groups(made, packed_scales, zeros if made.has_zeros else None)
    return Matrix(values.to(torch.int32), groups=groups)


def random_dense(made: Packing) -> Matrix:
    weight = torch.randn(made.outputs, made.inputs, device="cuda", dtype=DTYPE)
    return Matrix(weight.mul_(made.inputs**-0.5))


def num_bytes(matrix: Matrix) -> int:
    """Bytes of the weights."""
    groups = matrix.groups
    kept = [matrix.values, *((groups.scales, groups.zeros) if groups else ())]
    return sum(each.numel() * each.element_size() for each in kept if each is not None)


def steady_seconds(runs: list[Callable[[], object]]) -> float:
    """Return the seconds of one run, over replays of a graph of all for `STEADY_S`."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    begin, replays = time.perf_counter(), 0
    while time.perf_counter() - begin < WARM_S:
        graph.replay()
        torch.cuda.synchronize()
        replays += 1
    replays = max(5, math.ceil(replays * STEADY_S / WARM_S))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / replays / len(runs)


def multiply_rate() -> float:
    """FLOP/s of large products of 16 bits."""
    x, weight = (torch.randn(LARGE, LARGE, device="cuda", dtype=DTYPE) for _ in range(2))
    return 2 * LARGE**3 / steady_seconds([lambda: linear(x, Matrix(weight))])


def timed(x: torch.Tensor, matrices: list[Matrix]) -> list[tuple[str, float]]:
    """Return the seconds of each kernel that takes the GEMM; the chosen one comes first."""
    first = matrices[0]
    spec = spec_of(x, first.values, PLAIN._replace(groups=first.groups))
    found = []
    for each in gemm.implementations.answers(spec, spec.target):
        if each.refusal is None:

            def product(matrix: Matrix, run: Callable[..., object]) -> Callable[[], object]:
                around = PLAIN._replace(groups=matrix.groups)
                return lambda: run(x, matrix.values, around)

            run = each.implementation.run
            runs = [product(matrix, run) for matrix in matrices]
            found.append((each.implementation.name, steady_seconds(runs)))
    return found


def table(options: argparse.Namespace, read: float, flops: float) -> None:
    for inputs, outputs in SHAPES:
        group = options.group or inputs
        made = Packing(options.bits, group, outputs, inputs, DTYPE, options.zeros)
        matrices = []
        for kind in (random_packed, random_dense):
            copies = max(3, math.ceil(ROTATION / num_bytes(kind(made))))
            matrices.append([kind(made) for _ in range(copies)])
        for rows in options.rows:
            x = torch.randn(rows, inputs, device="cuda", dtype=DTYPE)
            _, wide = timed(x, matrices[1])[0]
            for each in matrices[::-1]:
                moved = num_bytes(each[0]) + 2 * rows * (inputs + outputs)
                limit = max(moved / read, 2 * rows * inputs * outputs / flops)
                for i, (name, seconds) in enumerate(timed(x, each)):
                    print(
                        f"{inputs:5} x {outputs:5} {rows:5} {'*' if i == 0 else ' '}{name:13}"
                        f"{seconds * 1e6:9.2f} {limit / seconds:6.1%} "
                        f"{moved / seconds / 1e9:6.0f} {wide / seconds:6.2f}x",
                        flush=True,
                    )
        del matrices
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int, default=128, help="0: a scale for each row")
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options = parser.parse_args()
    read, flops = read_bandwidth(), multiply_rate()
    print(f"{torch.cuda.get_device_name()}: {read / 1e12:.3f} TB/s, {flops / 1e12:.0f} TFLOP/s")
    kind = f"{options.bits} bits by {options.group or 'row'}"
    print(f"{kind}; * is chosen; gain over the chosen one with 16 bits")
    print(f"inputs x outputs rows  {'kernel':13} us of limit  GB/s   gain")
    table(options, read, flops)


if __name__ == "__main__":
    main()
