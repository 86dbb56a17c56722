"""Products with weights of 4 or 8 bits beside those with 16, at Llama-3.1-8B's matrices.

    PYTHONPATH=backend python benchmarks/weights4.py [--bits 4] [--group 128] [--zeros] [--rows 1 8]
    ... --e4m3 [--scale float32]    codes of e4m3, whose long prompts' rows may be e4m3, too
    ... --type q4_k    GGUF's Q4_K, or q6_k, or another type with records
    ... --ends    a head of Llama-3's vocabulary, then lookups of as many rows of an embedding

Random weights; each product runs in a graph over several copies that together exceed the L2 cache,
for `--seconds`: by default every kernel that takes it, at nine sizes, in less than 90 seconds. The
last table has the fastest of each size, which is what `kernels/gemm/packed_routes.py` should name.
The limit of a product is its bytes over what this GPU reads, or its
operations over what it multiplies in 16 bits, whichever takes longer; both are measured first.
Rows in e4m3 have the same limit, which they can beat. Beside 4 bits without zeros, and codes of
e4m3, stand weights in e4m3 by row (`e4m3 NAME`). Products of e4m3 that are left unscaled, as those
of prompts are, are timed without the kernel that scales them with what follows. Prompts:
`--rows 512 1024 2048 4096`; of `unpacked_e4m3` they show the parts, too: unpacking, and the product
by each way to scale x. Lookups read `--rows` random rows of a packed matrix, and of one in 16 bits
by torch.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ceilings import read_bandwidth
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.eight_bits import Quantized
from slipstream.kernels.gemm import cublaslt_groups, packing, records
from slipstream.kernels.gemm.cublaslt_groups import matmul_by_groups
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.lookup import lookup
from slipstream.kernels.gemm.op import E4M3, PLAIN, Around, Matrix, gemm, spec_of
from slipstream.kernels.gemm.packing import BLOCK, TILE, CodeType, Groups, Packing
from slipstream.kernels.gemm.tiles import describe
from slipstream.kernels.gemm.unpacked_e4m3 import unpacked_e4m3
from slipstream.kernels.runtime import jit
from timing import DTYPE, ROTATION, need_gpu
from torch.nn import functional

Rows = torch.Tensor | Quantized
# GGUF's types with records: bits and record; "mixed": several under one another.
TYPES = {"q4_1": (4, "pair"), "q4_k": (4, "shared"), "q5_1": (8, "pair"), "q5_k": (8, "shared")}
TYPES |= {"q6_k": (8, "halves"), "mixed": (8, "wide")}
SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # inputs, outputs
HEAD = (4096, 128256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEADY_S, WARM_S = 0.15, 0.02
LOOKUPS = 16  # of other rows each
LARGE = 8192  # of the products that show what the GPU multiplies


def random_packed(made: Packing) -> Matrix:
    """Return weights of random codes, in the order of the kernels as they are."""
    words = made.blocks * BLOCK * TILE * made.bits // 32
    values = torch.randint(-(1 << 31), 1 << 31, (made.tiles, words), device="cuda")
    if made.code_type == "e4m3":
        values &= ~0x08080808  # no NaN
    if made.record:
        return Matrix(values.to(torch.int32), groups=Groups(made, random_records(made)))
    shape = (made.tiles, made.groups, TILE)
    scales = torch.rand(shape, device="cuda") / made.inputs**0.5 / (1 << made.bits - 2)
    middle = 1 << made.bits - 1
    zeros = torch.randint(middle - 3, middle + 3, shape, device="cuda").to(torch.uint8)
    packed_scales = scales.to(made.scale)
    groups = Groups(made, packed_scales, zeros if made.has_zeros else None)
    return Matrix(values.to(torch.int32), groups=groups)


def random_records(made: Packing) -> torch.Tensor:
    """Return records of random scales and minimums, in the order of the kernels."""
    each = 2 if made.record in records.BY_HALVES else 1
    shape = (made.tiles * TILE, made.groups * each)
    unit = made.inputs**-0.5 / (1 << made.bits - 2)

    def halved(most: float) -> torch.Tensor:
        return torch.full(shape, most, device="cuda", dtype=torch.float16)

    if made.record == "pair":
        numbers = records.Numbers(halved(unit), halved(-unit))
    else:
        whole = [torch.randint(0, 64, shape, device="cuda").to(torch.uint8) for _ in range(2)]
        numbers = records.Numbers(*whole, halved(unit / 64), halved(-unit / 64))
    return packing.records_by_tile(records.made(made.record, numbers, made.groups), made)


def random_dense(made: Packing) -> Matrix:
    weight = torch.randn(made.outputs, made.inputs, device="cuda", dtype=DTYPE)
    return Matrix(weight.mul_(made.inputs**-0.5))


def random_e4m3(made: Packing) -> Matrix:
    weight = torch.randn(made.outputs, made.inputs, device="cuda", dtype=DTYPE)
    return Matrix(*eight_bits.quantize(weight.mul_(made.inputs**-0.5)))


def num_bytes(matrix: Matrix) -> int:
    """Bytes of the weights."""
    groups = matrix.groups
    kept = [matrix.values, *((groups.scales, groups.zeros) if groups else ())]
    return sum(each.numel() * each.element_size() for each in kept if each is not None)


def steady_seconds(runs: list[Callable[[], object]], steady_s: float = STEADY_S) -> float:
    """Return the seconds of one run, over replays of a graph of all for `steady_s`."""
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
    replays = max(5, math.ceil(replays * steady_s / WARM_S))
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


def values_of(x: Rows) -> torch.Tensor:
    return x.values if isinstance(x, Quantized) else x


def arounds(x: Rows, matrix: Matrix) -> list[Around]:
    """Return what may be around a GEMM: of rows in e4m3 their scales, or nothing yet."""
    bare = PLAIN._replace(groups=matrix.groups)
    if isinstance(x, Quantized):
        return [bare._replace(rows=x.scales, columns=matrix.scales), bare]
    return [bare]


def candidates(x: Rows, matrix: Matrix, skip: list[str]) -> list[tuple[Any, int]]:
    """Return the kernels that take the GEMM, the cheapest first, and which of `arounds` each."""
    found = []
    for i, around in enumerate(arounds(x, matrix)):
        spec = spec_of(values_of(x), matrix.values, around)
        for each in gemm.implementations.answers(spec, spec.target):
            if each.refusal is None and each.implementation.name not in skip:
                # What leaves the scales costs a kernel more, as in `linear.paths`.
                found.append((each.cost + i, i, each.implementation))
    found.sort(key=lambda each: each[:2])
    return [(implementation, i) for _, i, implementation in found]


def product(x: Rows, matrix: Matrix, candidate: tuple[Any, int]) -> Callable[[], Any]:
    rows, (each, i) = values_of(x), candidate
    around = arounds(x, matrix)[i]
    return lambda: each.run(rows, matrix.values, around)


def rows_for(matrix: Matrix, rows: int, inputs: int) -> Rows:
    """Return random rows as the weights want them; their rounding is not timed."""
    x = torch.randn(rows, inputs, device="cuda", dtype=DTYPE)
    takes = matrix.groups.packing.takes_e4m3 if matrix.groups else matrix.takes_quantized
    return eight_bits.quantize(x) if takes else x


def compile_all(kinds: list[list[Matrix]], inputs: int, options: argparse.Namespace) -> None:
    """Compile what will run, side by side."""
    with jit.compile_ahead():
        for matrices, rows in itertools.product(kinds, options.rows):
            x = rows_for(matrices[0], rows, inputs)
            for each in candidates(x, matrices[0], options.skip):
                product(x, matrices[0], each)()


def parts(x: Rows, matrices: list[Matrix], seconds: float) -> None:
    """Print what unpacking to e4m3 takes, and the product behind it by each way to scale x."""
    values, device = values_of(x), matrices[0].values.get_device()
    groups = [matrix.groups for matrix in matrices if matrix.groups is not None]
    runs = [partial(unpacked_e4m3, m.values, g) for m, g in zip(matrices, groups, strict=True)]
    print(f"{'':12}- {'unpacking':13}{steady_seconds(runs, seconds) * 1e6:8.2f}", flush=True)
    ways, weights = cublaslt_groups.X_SCALES, [run() for run in runs]
    outputs, inputs = weights[0][0].shape
    for way in ways:
        cublaslt_groups.X_SCALES = (way,)
        cublaslt_groups.plan_of.cache_clear()
        rows = cublaslt_groups.padded(len(values))
        plan = cublaslt_groups.plan_of(rows, inputs, outputs, device)
        if plan is None:
            print(f"{'':12}- x by {way}: no kernel")
            continue
        products = [partial(matmul_by_groups, values, *weight) for weight in weights]
        time_us = steady_seconds(products, seconds) * 1e6
        print(f"{'':12}- x by {way:8}{time_us:8.2f} {describe(plan.algorithm)}", flush=True)
    cublaslt_groups.X_SCALES = ways
    cublaslt_groups.plan_of.cache_clear()


def timed(
    x: Rows, matrices: list[Matrix], limit: float, wide: float, options: argparse.Namespace
) -> list[tuple[float, str]]:
    """Print a line for each kernel; return its seconds and its name, the fastest first.

    Args:
        x: rows.
        matrices: copies of a matrix.
        limit: seconds.
        wide: seconds of the fastest kernel with 16 bits; 0: these are of 16 bits.
        options: of the command.
    """
    found = []
    values = values_of(x)
    kind = "e4m3 " if matrices[0].values.dtype == E4M3 else ""
    for i, each in enumerate(candidates(x, matrices[0], options.skip)):
        runs = [product(x, matrix, each) for matrix in matrices]
        seconds = steady_seconds(runs, options.seconds)
        name = f"{kind}{each[0].name}"
        found.append((seconds, name))
        moved = num_bytes(matrices[0]) + values.nbytes
        gain = f"{wide / seconds:6.2f}x" if wide else ""
        print(
            f"{values.shape[1]:5} {len(values):5} {'*' if i == 0 else ' '}{name:13}"
            f"{seconds * 1e6:9.2f} {limit / seconds:6.1%} {moved / seconds / 1e9:6.0f} {gain}",
            flush=True,
        )
        if each[0].name == "unpacked_e4m3":
            parts(x, matrices, options.seconds)
    return sorted(found)


def packings_of(options: argparse.Namespace, inputs: int, outputs: int) -> list[Packing]:
    """Return the packings that the options ask for, each of which is timed."""
    if options.type:
        bits, record = TYPES[options.type]
        sizes = (bits, records.INPUTS, outputs, inputs, torch.float16, False)
        return [Packing(*sizes, record=record)]
    code_type: CodeType = "e4m3" if options.e4m3 else "integers"
    sizes = (options.bits, options.group or inputs, outputs, inputs)
    made = Packing(*sizes, getattr(torch, options.scale), options.zeros, code_type)
    if options.e4m3:
        return [made, made._replace(can_round_rows=True)]
    return [made, made._replace(for_e4m3=True)] if made.bits == 4 and not made.has_zeros else [made]


def table(options: argparse.Namespace, read: float, flops: float) -> list[str]:
    """Print a line for each kernel; return one for each size."""
    best = []
    for inputs, outputs in (HEAD,) if options.ends else SHAPES:
        print(f"-- {inputs} x {outputs}")
        packings, kinds = packings_of(options, inputs, outputs), []
        made = packings[0]
        makers = [partial(random_dense, made), *(partial(random_packed, one) for one in packings)]
        if len(packings) > 1:
            makers.append(partial(random_e4m3, made))
        for make in makers:
            copies = max(3, math.ceil(ROTATION / num_bytes(make())))
            kinds.append([make() for _ in range(copies)])
        compile_all(kinds, inputs, options)
        for rows in options.rows:
            least = 2 * rows * inputs * outputs / flops
            around = 2 * rows * (inputs + outputs)
            limits = [max((num_bytes(kind[0]) + around) / read, least) for kind in kinds]
            xs = [rows_for(kind[0], rows, inputs) for kind in kinds]
            dense = timed(xs[0], kinds[0], limits[0], 0.0, options)[0]
            found = timed(xs[1], kinds[1], limits[1], dense[0], options)
            for x, kind in zip(xs[2:], kinds[2:], strict=True):
                also = timed(x, kind, limits[1], dense[0], options)
                found += also if kind[0].groups is not None else []
            found.sort()
            fastest = "  ".join(f"{name} {at * 1e6:.2f}" for at, name in found[:3])
            best.append(
                f"{inputs:5} x {outputs:5} {rows:5} {dense[0] / found[0][0]:5.2f}x "
                f"{limits[1] / found[0][0]:6.1%}  {fastest}; {dense[1]} {dense[0] * 1e6:.2f}"
            )
        del kinds
        torch.cuda.empty_cache()
    return best


def lookups(options: argparse.Namespace) -> None:
    """Print what it takes to look up rows of an embedding, packed and in 16 bits."""
    inputs, outputs = HEAD
    made = packings_of(options, inputs, outputs)[0]
    (values, _, groups), (dense, *_) = random_packed(made), random_dense(made)
    assert groups is not None, "it is packed"
    print("  rows of an embedding: us packed, us in 16 bits")
    for rows in options.rows:
        drawn = [torch.randint(0, outputs, (rows,), device="cuda") for _ in range(LOOKUPS)]
        runs = [partial(lookup, values, ids, groups, DTYPE) for ids in drawn]
        plain = [partial(functional.embedding, ids, dense) for ids in drawn]
        times = [steady_seconds(each, options.seconds) * 1e6 for each in (runs, plain)]
        print(f"{rows:6} {times[0]:8.2f} {times[1]:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int, default=128, help="0: a scale for each row")
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--e4m3", action="store_true", help="codes of e4m3: 8 bits, no zeros")
    scales = ("bfloat16", "float16", "float32")
    parser.add_argument("--scale", choices=scales, default="bfloat16", help="type of scales")
    parser.add_argument("--type", choices=TYPES, default="", help="of GGUF, in place of these")
    parser.add_argument("--ends", action="store_true", help="head and embedding alone")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=STEADY_S, help="of each kernel and size")
    parser.add_argument("--skip", nargs="+", default=[], help="kernels to leave out")
    options = parser.parse_args()
    need_gpu()
    if options.e4m3:
        options.bits, options.zeros = 8, False
    read, flops = read_bandwidth(), multiply_rate()
    print(f"{torch.cuda.get_device_name()}: {read / 1e12:.3f} TB/s, {flops / 1e12:.0f} TFLOP/s")
    kind = f"{'e4m3' if options.e4m3 else f'{options.bits} bits'} by {options.group or 'row'}"
    kind = options.type or kind
    print(f"{kind}; * is chosen; gain over the fastest with 16 bits")
    print(f"inputs  rows  {'kernel':13}       us of limit  GB/s    gain")
    best = table(options, read, flops)
    print("the fastest: gain over the fastest with 16 bits, share of the limit, us")
    print("\n".join(best))
    if options.ends:
        lookups(options)


if __name__ == "__main__":
    main()
