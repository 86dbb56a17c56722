"""The references of the kernels of 8 bits, against fp64 written another way."""

import math

import pytest
import torch
from fixtures.kernels.checking import Judge, same_bits, short
from fixtures.kernels.eight_bits_cases import (
    Rotation,
    dequantized,
    is_rounded,
    normed,
    random_product,
    scaled,
    silu_mul,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.gemm.cublaslt import matmul
from slipstream.kernels.gemm.op import PLAIN, Around, gemm, spec_of
from slipstream.kernels.gemm.sm90 import skinny
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import KNOWN

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from(DTYPES)

E4M3, INT8 = eight_bits.E4M3, eight_bits.INT8
TYPES = (E4M3, INT8)
types = st.sampled_from(TYPES)
CODES = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
NUMBERS = {  # every number of the type that a row may have, sorted
    E4M3: CODES[~CODES.isnan()].unique(),
    INT8: torch.arange(-127, 128).double(),
}


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(types, sizes, sizes, dtypes, seeds, st.integers(-20, 12))
def test_every_value_becomes_the_nearest_number(
    kind: torch.dtype, n: int, width: int, dtype: torch.dtype, seed: int, exponent: int
) -> None:
    x = normal(n, width, dtype=dtype, seed=seed) * 2.0**exponent
    quantized = eight_bits.quantize(x, kind)
    units = x.double() / quantized.scales.double()[:, None]
    least = (units[..., None] - NUMBERS[kind]).abs().amin(-1)
    distance = (units - quantized.values.double()).abs()
    assert (distance <= least + units.abs() * 1e-6).all()
    largest = quantized.values.double().abs().amax(-1)
    assert torch.equal(largest, torch.where(x.any(-1), NUMBERS[kind][-1], 0.0).double())


def test_halves_become_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert eight_bits.quantize(x, INT8).values.tolist() == [[127, 0, 2, 2, 0, -2, -126]]


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows_of_extremes(dtype: torch.dtype, kind: torch.dtype) -> None:
    """Zeros stay zeros; the smallest and the largest rows stay finite; NaN and infinity show."""
    limits = torch.finfo(dtype)
    rows = torch.ones(7, 32)
    rows[0] = 0
    rows[1, 1:] = 0
    rows[1, 0] = 2.0**-20
    rows[2, ::2] = -1
    rows[3, 5], rows[4, 5], rows[5, 5] = math.nan, math.inf, -math.inf
    x = rows.to(dtype)
    x[1] *= limits.tiny * 2.0**20  # one smallest normal number
    x[2] *= limits.max / 2
    values, scales = eight_bits.quantize(x, kind)
    weight = eight_bits.quantize(torch.eye(32), kind)
    product = matmul(values, weight.values)
    out = eight_bits.scale(product, scales, weight.scales, torch.float32)
    assert not out[0].any()
    assert scales[0] > 0
    assert out[:3].isfinite().all()
    assert (out[2].abs() / (limits.max / 2) - 1).abs().max() < 0.01
    assert out[3:6].isnan().all()
    assert (out[6] - 1).abs().max() < 1e-6


@settings(max_examples=40, deadline=None)
@given(types, sizes, st.integers(2, 70), dtypes, seeds)
def test_norms(kind: torch.dtype, n: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = (normal(k, width, dtype=dtype, seed=seed + k) for k in (n, 1))
    exact = normed(x.double(), weight[0], 1e-5)
    judge = Judge("norm")
    out = eight_bits.norm_quantize(x, weight[0], 1e-5, kind)
    judge.true("norm_quantize", is_rounded(out, exact))

    product, rows, columns, bias = random_product(n, width, dtype, seed=seed, kind=kind)
    for b in (None, bias):
        total, want = x.clone(), x.double() + scaled(torch.float64, product, rows, columns, b)
        out = eight_bits.add_norm_quantize(total, weight[0], product, rows, columns, 1e-5, b)
        judge.close("sum", total, want, want.to(dtype))
        alone = eight_bits.norm_quantize(total, weight[0], 1e-5, kind)
        judge.true("norm of the rounded sum", torch.equal(dequantized(out), dequantized(alone)))
    judge.verdict()


@settings(max_examples=40, deadline=None)
@given(types, sizes, sizes, dtypes, seeds)
def test_products(kind: torch.dtype, n: int, width: int, dtype: torch.dtype, seed: int) -> None:
    product, rows, columns, bias = random_product(n, 2 * width, dtype, seed=seed, kind=kind)
    judge = Judge("products")
    for b in (None, bias):
        exact = scaled(torch.float64, product, rows, columns, b)
        out = eight_bits.scale(product, rows, columns, dtype, b)
        judge.close("scale", out, exact, exact.to(dtype))
        x = normal(n, 2 * width, dtype=dtype, seed=seed)
        total = x.clone()
        eight_bits.add_scaled(total, product, rows, columns, b)
        judge.close("add_scaled", total, x.double() + exact, (x.double() + exact).to(dtype))
        gated = eight_bits.silu_mul_quantize(product, rows, columns, b)
        judge.true("silu_mul_quantize", is_rounded(gated, silu_mul(exact)))
    judge.verdict()


@settings(max_examples=30, deadline=None)
@given(types, sizes, sizes, sizes, seeds)
def test_matmul(kind: torch.dtype, n: int, k: int, m: int, seed: int) -> None:
    x, weight = (
        eight_bits.quantize(normal(rows, k, dtype=torch.float32, seed=seed + i), kind)
        for i, rows in enumerate((n, m))
    )
    exact = x.values.double() @ weight.values.double().T
    judge = Judge("matmul")
    product = matmul(x.values, weight.values)
    if kind == INT8:
        judge.true("exact", torch.equal(product, exact.to(torch.int32)))
    else:
        judge.close("matmul", product, exact, exact.bfloat16())
    pair, scales = (x.values, weight.values), Around(rows=x.scales, columns=weight.scales)
    expected = eight_bits.scale(product, x.scales, weight.scales, torch.bfloat16)
    judge.true("scaled", torch.equal(gemm.oracle(*pair, scales), expected))
    total = normal(n, m, dtype=torch.bfloat16, seed=seed)
    expected = total.clone()
    eight_bits.add_scaled(expected, product, x.scales, weight.scales)
    gemm.oracle(*pair, scales._replace(residual=total))
    judge.true("added", torch.equal(total, expected))
    if m % 2 == 0:
        out = gemm.oracle(*pair, scales._replace(gate="silu"))
        exact = silu_mul(scaled(torch.float64, product, x.scales, weight.scales, None))
        judge.close("gated", out, exact, exact.bfloat16())
    judge.verdict()


@pytest.mark.parametrize(
    ("refusal", "around", "out"),
    [
        (None, {}, torch.bfloat16),
        ("adds and gates what it scales", {"gate": "silu"}, torch.bfloat16),
        ("adds and gates what it scales", {"residual": True}, torch.bfloat16),
        ("adds and gates what it scales", {"bias": True}, torch.bfloat16),
        (None, {"scales": "both", "bias": True, "residual": True}, torch.bfloat16),
        ("scales e4m3 to bf16, and int8 to 16 bits", {"scales": "both"}, torch.float16),
    ],
)
def test_what_a_skinny_gemm_makes_of_e4m3(
    refusal: str | None, around: dict[str, object], out: torch.dtype
) -> None:
    x = torch.empty(16, 512, dtype=eight_bits.E4M3)
    spec = spec_of(x, x, PLAIN)._replace(target=KNOWN["sm_90a"], out=out, **around)
    assert skinny.takes(spec) == refusal


def test_sums_of_int8_are_exact_and_rounded_once() -> None:
    """They have more bits than fp32: the last one counts, until scales make floats of them."""
    x, weight = torch.full((2, 20_000), 127, dtype=INT8), torch.full((4, 20_000), 127, dtype=INT8)
    x[1, 0] = 126
    sums = [127 * 127 * 20_000, 127 * 127 * 20_000 - 127]
    product = matmul(x, weight)
    assert product[:, 0].tolist() == sums
    rows, columns = torch.tensor([0.5, 3.0]), torch.full((4,), 1e-9)
    out = gemm.oracle(x, weight, Around(rows=rows, columns=columns))
    exact = torch.tensor(sums).float() * columns[0] * rows
    assert torch.equal(out[:, 0], exact.bfloat16())
    assert gemm.oracle(x, weight).tolist() == product.tolist()


def test_other_types_are_refused() -> None:
    launch = eight_bits.quantize.launcher
    assert launch is not None
    with pytest.raises(KernelError, match=r"no kernels to torch\.uint8"):
        launch(torch.ones(1, 16, dtype=torch.bfloat16), torch.uint8)
    gate = eight_bits.silu_mul_quantize.launcher
    assert gate is not None
    with pytest.raises(KernelError, match=r"no kernels for products in torch\.float32"):
        gate(torch.ones(1, 32), torch.ones(1), torch.ones(32))


def test_sums_beyond_half_are_kept() -> None:
    ones = eight_bits.quantize(torch.ones(2, 14336))
    product = matmul(ones.values, ones.values)
    assert (product > 2.8e9).all()
    out = eight_bits.scale(product, ones.scales, ones.scales, torch.float16)
    assert (out / 14336 - 1).abs().max() <= 2**-8  # the product is rounded to bfloat16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_rotation_of_a_product(bias: bool, norms: bool) -> None:
    """Scaled on the way is as scaled before."""
    case = Rotation(11, 16, bias=bias)
    before = eight_bits.scale(
        case.product, case.scales.rows, case.scales.columns, torch.bfloat16, case.scales.bias
    )
    want = case(before, None, norms)
    got = case(case.product, case.scales, norms)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_shapes_without_kernels_are_refused() -> None:
    launch = eight_bits.quantize.launcher
    assert launch is not None
    with pytest.raises(KernelError, match=r"no kernels for torch\.float32"):
        launch(torch.ones(1, 16))
    with pytest.raises(KernelError, match="rows of 12"):
        launch(torch.ones(1, 12, dtype=torch.bfloat16))
    with pytest.raises(KernelError, match="contiguous"):
        launch(torch.ones(2, 32, dtype=torch.bfloat16)[:, :16])
    with pytest.raises(KernelError, match="rows of 32784, above 32768"):
        launch(torch.ones(1, 32784, dtype=torch.bfloat16))


def test_no_rows() -> None:
    values, scales = eight_bits.quantize(torch.empty(0, 16))
    assert (values.shape, scales.shape) == ((0, 16), (0,))
    assert same_bits(matmul(values, values), torch.empty(0, 0, dtype=torch.bfloat16))
    values, _ = eight_bits.quantize(torch.empty(0, 16), INT8)
    assert same_bits(matmul(values, values), torch.empty(0, 0, dtype=torch.int32))
