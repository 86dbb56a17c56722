"""The kernels of 8 bits on a GPU: against fp64, bit by bit against the CPU, repeated, in graphs."""

import math
from collections.abc import Callable

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, random, same_bits, short
from fixtures.kernels.eight_bits_cases import (
    Rotation,
    dequantized,
    normed,
    random_product,
    scaled,
    silu_mul,
)
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.eight_bits import Quantized
from slipstream.kernels.gemm.cublaslt import matmul
from torch import Tensor

pytestmark = pytest.mark.gpu

KINDS = (eight_bits.E4M3, eight_bits.INT8)
KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
LARGEST = {eight_bits.E4M3: 448, eight_bits.INT8: 127}
WIDTHS = (16, 272, 1008, 4096, 8208, 14336, 16384, 16400, 32768)
ROWS = (1, 130)


def poisoned(n: int, width: int, run: Callable[[], Quantized]) -> Quantized:
    """`run`, its outputs made where NaN lay."""
    kept = torch.full((n, width), 0x7F, dtype=torch.uint8, device="cuda")
    poison((n,), dtype=torch.float32)
    del kept
    return run()


def as_bytes(x: Quantized) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in x])


def check(judge: Judge, case: str, exact: Tensor, run: Callable[[], Quantized]) -> None:
    """Error against that of quantising the exact values, scales too; the same bits again."""
    out = poisoned(*exact.shape, run)
    kind = out.values.dtype
    naive = eight_bits.quantize.oracle(exact.float(), kind)
    judge.close(case, dequantized(out).float(), exact, dequantized(naive))
    scales = exact.abs().amax(-1) / LARGEST[kind]
    judge.close(f"{case}: scales", out.scales, scales, scales.float())
    judge.repeats(case, lambda: as_bytes(poisoned(*exact.shape, run)))


@KIND
@pytest.mark.parametrize("dtype", eight_bits.DTYPES, ids=short)
def test_quantize(dtype: torch.dtype, kind: torch.dtype) -> None:
    judge = Judge(f"quantize {short(dtype)} {kind}")
    for width in WIDTHS:
        for n in ROWS:
            x = random(n, width, dtype=dtype, seed=n + width)
            check(judge, f"{n} x {width}", x.double(), lambda x=x: eight_bits.quantize(x, kind))
            want = eight_bits.quantize(x.cpu(), kind)
            got = eight_bits.quantize(x, kind)
            judge.true(f"{n} x {width}: scales", same_bits(got.scales.cpu(), want.scales))
            judge.true(
                f"{n} x {width}: values",
                same_bits(got.values.cpu().view(torch.uint8), want.values.view(torch.uint8)),
            )
    assert eight_bits.quantize(random(0, 64, dtype=dtype), kind).values.shape == (0, 64)
    judge.verdict()


@KIND
@pytest.mark.parametrize("dtype", eight_bits.DTYPES, ids=short)
def test_extremes(dtype: torch.dtype, kind: torch.dtype) -> None:
    """Zeros, the smallest and the largest rows as on the CPU; NaN and infinity spoil their rows."""
    judge = Judge(f"extremes {short(dtype)} {kind}")
    limits = torch.finfo(dtype)
    x = torch.ones(8, 4096, dtype=dtype)
    x[0] = 0
    x[1] *= limits.tiny
    x[2] = 0
    x[2, 77] = limits.smallest_normal
    x[3] *= limits.max
    x[3, ::2] *= -1
    x[4, 5], x[5, 4095], x[6, 0] = math.nan, math.inf, -math.inf
    got, want = eight_bits.quantize(x.cuda(), kind), eight_bits.quantize(x, kind)
    fine = [0, 1, 2, 3, 7]
    judge.true("values", torch.equal(got.values.cpu().float()[fine], want.values.float()[fine]))
    judge.true("scales", torch.equal(got.scales.cpu()[fine], want.scales[fine]))
    weight = eight_bits.quantize(random(64, 4096, dtype=dtype), kind)
    out = eight_bits.scale(
        matmul(got.values, weight.values), got.scales, weight.scales, torch.bfloat16
    )
    judge.true("spoilt rows", bool(out[4:7].isnan().all()))
    judge.true("others", bool(out[[0, 1, 2, 7]].isfinite().all()))
    ones = torch.ones(4096, dtype=dtype, device="cuda")
    normed_rows = dequantized(eight_bits.norm_quantize(x.cuda(), ones, 1e-5, kind))
    judge.true("norm: spoilt rows", bool(normed_rows[4:7].isnan().any(-1).all()))
    judge.true("norm: zeros", not normed_rows[0].any())
    judge.true("norm: ones", bool(((normed_rows[7] - 1).abs() < 1e-4).all()))
    judge.verdict()


@KIND
@pytest.mark.parametrize("dtype", eight_bits.DTYPES, ids=short)
def test_norms(dtype: torch.dtype, kind: torch.dtype) -> None:
    judge = Judge(f"norms {short(dtype)} {kind}")
    for width in WIDTHS:
        weight = 1 + 0.1 * random(width, dtype=dtype, seed=1)
        for n in ROWS:
            case = f"{n} x {width}"
            x = random(n, width, dtype=dtype, seed=n + width)
            exact = normed(x.double(), weight, 1e-5)
            run = lambda x=x, w=weight: eight_bits.norm_quantize(x, w, 1e-5, kind)  # noqa: E731
            check(judge, f"norm_quantize {case}", exact, run)

            product, rows, columns, bias = random_product(
                n, width, dtype, "cuda", seed=width, kind=kind
            )
            for b in (None, bias):
                with_bias = f"{case}{'' if b is None else ' bias'}"
                addend = (product, rows, columns)
                want = x.double() + scaled(torch.float64, *addend, b)
                total = x.clone()
                eight_bits.add_norm_quantize(total, weight, *addend, 1e-5, b)
                judge.close(f"sum {with_bias}", total, want, want.to(dtype))

                def add(x=x, w=weight, addend=addend, b=b) -> Quantized:
                    return eight_bits.add_norm_quantize(x.clone(), w, *addend, 1e-5, b)

                exact = normed(total.double(), weight, 1e-5)
                check(judge, f"add_norm_quantize {with_bias}", exact, add)
                split = x.clone()
                eight_bits.add_scaled(split, *addend, b)
                judge.true(f"add_scaled {with_bias}", same_bits(split, total))
    judge.verdict()


@KIND
@pytest.mark.parametrize("dtype", eight_bits.DTYPES, ids=short)
def test_products(dtype: torch.dtype, kind: torch.dtype) -> None:
    judge = Judge(f"products {short(dtype)} {kind}")
    for width in WIDTHS:
        for n in ROWS:
            product, rows, columns, bias = random_product(
                n, 2 * width, dtype, "cuda", seed=n, kind=kind
            )
            for b in (None, bias):
                case = f"{n} x {width}{'' if b is None else ' bias'}"
                addend = (product, rows, columns)
                exact, naive = (scaled(t, *addend, b) for t in (torch.float64, torch.float32))
                poison(exact.shape, dtype=dtype)
                run = lambda addend=addend, b=b: eight_bits.scale(*addend, dtype, b)  # noqa: E731
                judge.close(f"scale {case}", run(), exact, naive.to(dtype))
                judge.repeats(f"scale {case}", run)

                def gate(addend=addend, b=b) -> Quantized:
                    return eight_bits.silu_mul_quantize(*addend, b)

                check(judge, f"silu_mul_quantize {case}", silu_mul(exact), gate)
    judge.verdict()


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
def test_rotation_of_a_product(head_size: int) -> None:
    """Scaled on the way is as scaled before."""
    judge = Judge("rotation")
    for n in (1, 130):
        for bias in (False, True):
            rotation = Rotation(n, head_size, "cuda", bias)
            rows, columns, b = rotation.scales
            before = eight_bits.scale(rotation.product, rows, columns, torch.bfloat16, b)
            for norms in (False, True):
                case = f"{n} rows{' bias' if bias else ''}{' norms' if norms else ''}"
                want = rotation(before, None, norms)
                got = rotation(rotation.product, rotation.scales, norms)
                for name, x, y in zip(("q", "cache"), got, want, strict=True):
                    judge.true(f"{name} {case}", same_bits(x, y))
    judge.verdict()


@KIND
def test_many_rows(kind: torch.dtype) -> None:
    """More rows than run at once: two CTAs with one each share a multiprocessor."""
    judge = Judge("many rows")
    for width in (8208, 14336, 14352):
        product, rows, columns, bias = random_product(
            400, 2 * width, torch.float16, "cuda", kind=kind
        )
        for b in (None, bias):
            exact = silu_mul(scaled(torch.float64, product, rows, columns, b))
            run = lambda p=product, r=rows, c=columns, b=b: eight_bits.silu_mul_quantize(  # noqa: E731
                p, r, c, b
            )
            check(judge, f"silu_mul_quantize {width}", exact, run)
    judge.verdict()


def chain(x: Tensor, weights: list[tuple[Tensor, Quantized, Quantized]], settle: bool) -> Tensor:
    """Gated MLPs on a residual sum; `settle` waits after every kernel."""

    def wait() -> None:
        if settle:
            torch.cuda.synchronize()

    kind = weights[0][1].values.dtype
    normed = eight_bits.norm_quantize(x, weights[0][0], 1e-5, kind)
    for norm, gate_up, down in weights:
        wait()
        product = matmul(normed.values, gate_up.values)
        wait()
        gated = eight_bits.silu_mul_quantize(product, normed.scales, gate_up.scales)
        wait()
        product = matmul(gated.values, down.values)
        wait()
        normed = eight_bits.add_norm_quantize(x, norm, product, gated.scales, down.scales, 1e-5)
    wait()
    return torch.cat([as_bytes(normed), x.view(torch.uint8).flatten()])


@KIND
def test_overlapping_kernels_wait_for_each_other(kind: torch.dtype) -> None:
    """A chain in a graph, where kernels start before those before them end, gives the same bits."""
    judge = Judge("overlap")
    weights = [
        (
            1 + 0.1 * random(1024, dtype=torch.bfloat16, seed=i),
            eight_bits.quantize(random(2 * 2048, 1024, dtype=torch.bfloat16, seed=i) / 32, kind),
            eight_bits.quantize(random(1024, 2048, dtype=torch.bfloat16, seed=i) / 32, kind),
        )
        for i in range(8)
    ]
    for n in (1, 16, 128, 700):
        start = random(n, 1024, dtype=torch.bfloat16, seed=n)
        want = chain(start.clone(), weights, settle=True)
        x = start.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.copy_(start)
            got = chain(x, weights, settle=False)
        for _ in range(20):
            got.fill_(0x7F)
            graph.replay()
            torch.cuda.synchronize()
            judge.true(f"{n} rows", same_bits(got, want))
    judge.verdict()
