"""GEMMs of 8 bits by 8 on a GPU, of a few rows and of many: exact sums, scales and stages."""

import itertools

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, random, same_bits, short, spread
from fixtures.kernels.eight_bits_cases import scaled, silu_mul
from slipstream.kernels.elementwise.eight_bits import PRODUCTS, add_scaled, quantize, scale
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import E4M3, INT8, PLAIN, Around, Matrix, gemm, spec_of
from slipstream.kernels.gemm.sm90.skinny import skinny
from slipstream.kernels.gemm.sm90.skinny import takes as skinny_takes
from slipstream.kernels.gemm.sm90.tall import takes as tall_takes
from slipstream.kernels.gemm.sm90.tall import tall

pytestmark = pytest.mark.gpu

KIND = pytest.mark.parametrize("kind", [E4M3, INT8], ids=["e4m3", "int8"])
TALL_ROWS = {E4M3: (256, 193, 200, 231, 255), INT8: (1019, 256, 129, 200, 255, 510)}


def values(rows: int, width: int, kind: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows of a type of 8 bits."""
    if kind == E4M3:
        return random(rows, width, dtype=E4M3, seed=seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-127, 128, (rows, width), generator=generator, device="cuda").to(INT8)


def unit(width: int, kind: torch.dtype) -> float:
    """A scale of columns with which products are of order 1."""
    return width**-0.5 * (1 if kind == E4M3 else 2e-4)


@KIND
def test_skinny_products_of_8_bits(kind: torch.dtype) -> None:
    """Unscaled; of e4m3 in bf16, terms of either sign, whose sums stay small; of int8 exact."""
    judge = Judge(f"skinny {kind}")
    for outputs, width in ((8, 512), (264, 640), (6144, 4096), (28672, 4096), (4096, 14336)):
        weight = values(outputs, width, kind, outputs)
        for rows in (1, 2, 9, 33, 64, 65, 128):
            x = values(rows, width, kind, rows)
            assert skinny_takes(spec_of(x, weight, PLAIN)) is None
            exact = x.double() @ weight.double().t()
            name = f"{rows} x {outputs, width}"
            poison(exact.shape, dtype=torch.float32)
            product = skinny(x, weight)
            judge.true(f"{name} type", product.dtype == PRODUCTS[kind])
            if kind == INT8:
                judge.true(name, torch.equal(product.double(), exact))
            else:
                judge.close(name, product, exact, exact.bfloat16())
            judge.repeats(name, lambda x=x, weight=weight: skinny(x, weight))
    judge.verdict()


@KIND
def test_skinny_products_of_8_bits_in_their_place(kind: torch.dtype) -> None:
    """With scales: the bits of what a kernel behind it would make, and gates."""
    judge = Judge(f"skinny {kind} with scales")
    for outputs, width in ((16, 512), (272, 640), (6144, 4096), (28672, 4096), (4096, 14336)):
        weight = values(outputs, width, kind, outputs)
        by_column = (0.5 + torch.rand(outputs, device="cuda")) * unit(width, kind)
        for rows, biased in itertools.product((1, 2, 9, 33, 64, 65, 128), (False, True)):
            x = values(rows, width, kind, rows)
            bias = random(outputs, dtype=torch.bfloat16, seed=3) if biased else None
            by_row = 0.5 + torch.rand(rows, device="cuda")
            scales, around = (by_row, by_column), Around(rows=by_row, columns=by_column, bias=bias)
            product = skinny(x, weight)
            expected = scale(product, *scales, torch.bfloat16, bias)
            name = f"{rows} x {outputs, width}{' bias' if biased else ''}"
            poison(product.shape, dtype=torch.bfloat16)
            judge.true(name, same_bits(skinny(x, weight, around), expected))
            total = spread(random(rows, outputs, dtype=torch.bfloat16, seed=4))
            expected = total.contiguous()
            add_scaled(expected, product, *scales, bias)
            skinny(x, weight, around._replace(residual=total))
            judge.true(f"{name} added", same_bits(total, expected))
            exact = scaled(torch.float64, product, *scales, bias)
            gated = silu_mul(scaled(torch.float64, x.double() @ weight.double().t(), *scales, bias))
            poison(gated.shape, dtype=torch.bfloat16)
            gate = around._replace(gate="silu")
            run = lambda x=x, w=weight, a=gate: skinny(x, w, a)  # noqa: E731
            judge.close(f"{name} gated", run(), gated, silu_mul(exact).bfloat16())
            judge.repeats(f"{name} gated", run)
    judge.verdict()


@KIND
def test_tall_of_8_bits(kind: torch.dtype) -> None:
    judge = Judge(f"tall {kind}")
    for outputs, width in ((28672, 4096), (28704, 384), (23248, 128), (29568, 640)):
        x, weight = values(1019, width, kind, width), values(outputs, width, kind, 0)
        by_row, by_column = (0.5 + torch.rand(n, device="cuda") for n in (1019, outputs))
        for bias in (None, random(outputs, dtype=torch.bfloat16, seed=3)):
            scales = (by_row, by_column * unit(width, kind), bias)
            product = x.double() @ weight.double().t()
            exact = silu_mul(scaled(torch.float64, product, *scales))
            rounded = product.bfloat16() if kind == E4M3 else product.float()
            naive = silu_mul(scaled(torch.float64, rounded, *scales)).bfloat16()
            whole = None
            for n in TALL_ROWS[kind]:
                some = Around(rows=by_row[:n], columns=scales[1], bias=bias, gate="silu")
                if n <= 256 or kind == INT8:
                    assert tall_takes(spec_of(x[:n], weight, some)) is None
                run = lambda x=x[:n], w=weight, s=some: tall(x, w, s)  # noqa: E731
                name = f"{n} x {outputs, width}{'' if bias is None else ' bias'}"
                poison((n, outputs // 2), dtype=torch.bfloat16)
                out = run()
                judge.close(name, out, exact[:n], naive[:n])
                judge.repeats(name, run)
                whole = out if whole is None else whole
                judge.true(f"{name}, bits of more rows", same_bits(out, whole[:n]))
    judge.verdict()


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_tall_of_int8_without_a_gate(biased: bool) -> None:
    """Tiles of every width, the last of either kind cut, of 1 to 4 CTAs that share out inputs: the
    oracle's bits, added in place, too.
    """
    judge = Judge("tall int8 without a gate")
    for outputs, width in ((6144, 4096), (4096, 1024), (28672, 256), (5008, 128), (8, 384)):
        weight = values(outputs, width, INT8, outputs)
        by_column = (0.5 + torch.rand(outputs, device="cuda")) * unit(width, INT8)
        bias = random(outputs, dtype=torch.bfloat16, seed=3) if biased else None
        for rows in (2304, 257, 1019, 4096, 129, 200, 384, 512):
            x, by_row = values(rows, width, INT8, rows), 0.5 + torch.rand(rows, device="cuda")
            around = Around(rows=by_row, columns=by_column, bias=bias)
            name = f"{rows} x {outputs, width}"
            poison((rows, outputs), dtype=torch.bfloat16)
            judge.true(name, same_bits(tall(x, weight, around), gemm.oracle(x, weight, around)))
            judge.repeats(name, lambda x=x, w=weight, a=around: tall(x, w, a))
            total = spread(random(rows, outputs, dtype=torch.bfloat16, seed=4))
            expected = total.contiguous()
            gemm.oracle(x, weight, around._replace(residual=expected))
            tall(x, weight, around._replace(residual=total))
            judge.true(f"{name} added", same_bits(total, expected))
            judge.true(f"{name} beside", bool(total._base.view(rows, -1)[:, :8].isnan().all()))
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_rows_of_int8_are_rounded_once(dtype: torch.dtype) -> None:
    """Whichever kernels multiply: the bits of exact sums, scaled and rounded as the oracle does;
    a row with NaN or infinity is NaN, and no other.
    """
    judge = Judge(f"int8, exact, {short(dtype)}")
    for outputs, width in ((6144, 4096), (4096, 14336), (1000, 528), (28672, 4096)):
        matrix = Matrix(*quantize(random(outputs, width, dtype=dtype, seed=1), INT8))
        bias = random(outputs, dtype=dtype, seed=3)
        for rows in (3, 16, 64, 65, 128, 129, 300, 2048):
            x = random(rows, width, dtype=dtype, seed=rows)
            x[1, 5], x[2, width - 1] = float("nan"), float("inf")
            small = quantize(x, INT8)
            out = linear(x, matrix, Around(bias=bias))
            given = (small.values, matrix.values)
            around = Around(rows=small.scales, columns=matrix.scales, bias=bias, out=dtype)
            wanted = gemm.oracle(*given, around)
            name = f"{rows} x {outputs, width}"
            judge.true(name, same_bits(out[3:], wanted[3:]) and same_bits(out[0], wanted[0]))
            judge.true(f"{name} NaN", bool(out[1:3].isnan().all()))
            judge.true(f"{name} others", bool(out[3:].isfinite().all()))
    judge.verdict()
