"""Activations and the rotation by their CUDA source, run on a CPU."""

import itertools

import pytest
import torch
from fixtures.kernels.eight_bits_cases import random_product
from fixtures.kernels.emulation import emulate
from fixtures.tiers import quick_of
from slipstream.kernels.cache import kv_format
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.activation import gegelu_mul, gelu_mul, silu_mul, xielu
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError
from torch import Tensor

NUMBERS = torch.tensor([0.9, 1.4, 0.5, -1e-6])


def close(found: Tensor, expected: Tensor) -> None:
    """Compare within rounding of the dtype, which is once."""
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=2 * eps, equal_nan=True)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows within longer ones, with 0, tiny and huge numbers and infinities among them."""
    drawn = torch.randn(count, width + 8, generator=torch.Generator().manual_seed(width))
    x = (drawn * 3).to(dtype)
    special = torch.tensor([0.0, -1e-7, 1e-7, -80.0, float("-inf"), float("inf"), float("nan")])
    x[count // 2, : len(special)] = special[: width + 8]
    return x[:, :width]


@pytest.mark.parametrize("dtype", quick_of(jit.DTYPES, [torch.bfloat16]), ids=str)
@pytest.mark.parametrize(("count", "width"), [(1, 2064), (3, 35), (133, 136)])
def test_xielu(dtype: torch.dtype, count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A width of vectors, and an odd one; of few rows, and of many, which share threads less."""
    emulate(monkeypatch)
    x = rows(count, width, dtype)
    close(xielu.launcher(x, NUMBERS), xielu.oracle(x, NUMBERS))


def test_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    for gate in (silu_mul, gelu_mul):
        x = rows(3, 528, torch.bfloat16)
        close(gate.launcher(x), gate.oracle(x))


@pytest.mark.parametrize("limit", [1.5, float("inf")])
@pytest.mark.parametrize("dtype", quick_of(jit.DTYPES, [torch.bfloat16]), ids=str)
def test_a_gate_that_is_cut_off(
    dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    for width in (528, 70):
        x = rows(3, width, dtype)
        close(gegelu_mul.launcher(x, limit), gegelu_mul.oracle(x, limit))


STAGES = {
    "plain": (False, False, False),
    "norms": (True, False, False),
    "late norms": (True, True, False),
    "late norms, factors": (True, True, True),
    "factors": (False, False, True),
}


@pytest.mark.parametrize("stages", quick_of(STAGES, ("norms", "late norms, factors")))
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8], ids=str)
def test_rotation(stages: str, cached: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, and what the cache has, are the oracle's; a quantised cache within a step of it."""
    emulate(monkeypatch)
    has_norms, late, has_factors = STAGES[stages]
    torch.manual_seed(0)
    n, heads, groups, size, block = 5, 3, 2, 64, 16
    norms = [torch.rand(size).bfloat16() + 0.5 for _ in range(2)] if has_norms else [None, None]
    factors = torch.rand(50) + 0.5 if has_factors else None
    how = HeadStages(None, *norms, 1e-5, None, late, factors)
    rows, angles = torch.randn(n, (heads + 2 * groups) * size).bfloat16(), torch.rand(50, size // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions, slots = torch.randint(0, 50, (n,)), torch.tensor([3, -1, 17, 16, 40])
    width = kv_format.row_size(cached, size)
    found = []
    for run in (rope_and_cache.launcher, rope_and_cache.oracle):
        cache = torch.zeros(4, groups, 2, block, width).to(cached)
        own = rows.clone()
        parts = own.split((heads * size, groups * size, groups * size), 1)
        q, k, v = (part.unflatten(1, (-1, size)) for part in parts)
        run(q, k, v, cos_sin, positions, slots, cache, how)
        found.append((q, kv_format.read(cache).float()))
    (q, kept), (expected, wanted) = found
    close(q, expected)
    step = 0.02 if cached is torch.int8 else 2**-7
    assert bool(((kept - wanted).abs() <= step * wanted.abs().amax(-1, True) + 1e-6).all())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "heads", "size", "block"),
    [("fp8", 2, 80, 32), ("int4", 3, 256, 16)],
)
def test_rows_of_a_cache_in_fewer_bits(
    name: str, heads: int, size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of all blocks are the oracle's, with NaN and infinity among the numbers; also where
    each head has blocks of its own.
    """
    emulate(monkeypatch)
    dtype = kv_format.FORMATS[name]
    shape = (3, heads, 2, block, kv_format.row_size(dtype, size))
    before = torch.randint(0, 256, shape, dtype=torch.uint8)
    angles = torch.cat((torch.ones(50, size // 2), torch.zeros(50, size // 2)), 1)
    slots = torch.tensor([block - 1, -1, 2 * block, block + 5, 3 * block - 1])
    stages = (None, kv_format.Static(0.37, 2.6)) if name == "fp8" else (None,)
    for static, is_whole in itertools.product(stages, (True, False)):
        x = rows(5, 3 * heads * size, torch.bfloat16).unflatten(1, (3, heads, size))
        caches = []
        for run in (rope_and_cache.launcher, rope_and_cache.oracle):
            cache = before.clone().view(dtype)
            cache = cache if is_whole else cache.view(-1, 1, *shape[2:])
            q, k, v = x.clone().unbind(1)
            run(q, k, v, angles, torch.arange(5), slots, cache, HeadStages(static=static))
            caches.append(cache.view(torch.uint8))
        assert torch.equal(*caches)


def test_stages_that_the_kernel_lacks() -> None:
    x = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    norm, place = x[0, 0], torch.zeros(1, dtype=torch.int64)
    given = (x, x, x, torch.zeros(2, 64), place, place, torch.zeros(1, 1, 2, 16, 64).bfloat16())
    early = HeadStages(None, norm, norm, factors=torch.zeros(2))
    with pytest.raises(KernelError, match="factors go with late norms"):
        rope_and_cache.launcher(*given, early)
    with pytest.raises(KernelError, match=r"factors must be \[positions\] f32"):
        rope_and_cache.launcher(*given, HeadStages(factors=torch.zeros(2).double()))


def same(found: eight_bits.Quantized, expected: eight_bits.Quantized) -> None:
    """Compare rows of int8: a value may be the next one where arithmetic in front rounds so."""
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0, equal_nan=True)
    fine = expected.scales.isfinite()
    assert bool((found.values.int() - expected.values.int())[fine].abs().max() <= 1)


@pytest.mark.parametrize("size", quick_of([(3, 72), (2, 8216), (140, 8216)], [(3, 72)]), ids=str)
@pytest.mark.parametrize("dtype", quick_of(eight_bits.DTYPES, [torch.bfloat16]), ids=str)
def test_rows_of_int8(
    dtype: torch.dtype, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in one access of a thread, in two, and in four; one has NaN in it, one infinity."""
    emulate(monkeypatch)
    count, width = size
    kind, norm = eight_bits.INT8, rows(1, width, dtype)[0, :width].contiguous().nan_to_num(1, 1, 1)
    x = rows(count, width, dtype).contiguous()
    x[0, 3] = float("inf")
    found, expected = (
        q(x, kind) for q in (eight_bits.quantize.launcher, eight_bits.quantize.oracle)
    )
    fine = expected.scales.isfinite()
    assert bool(fine.sum() == count - 2)
    assert torch.equal(found.values[fine], expected.values[fine])
    assert torch.equal(found.scales[fine], expected.scales[fine])
    assert torch.equal(found.scales.isnan(), ~fine)
    x = x.nan_to_num(1, 1, 1)
    norms = eight_bits.norm_quantize
    same(norms.launcher(x, norm, 1e-5, kind), norms.oracle(x, norm, 1e-5, kind))
    product, by_row, by_column, bias = random_product(count, width, dtype, kind=kind)
    sums = [x.clone(), x.clone()]
    add = eight_bits.add_norm_quantize
    stages = (product, by_row, by_column, 1e-5, bias)
    same(*(run(y, norm, *stages) for run, y in zip((add.launcher, add.oracle), sums, strict=True)))
    assert torch.equal(*sums)
    scale = eight_bits.scale
    given = (product, by_row, by_column, dtype, bias)
    assert torch.equal(scale.launcher(*given), scale.oracle(*given))
    gate, given = eight_bits.silu_mul_quantize, random_product(count, 2 * width, dtype, kind=kind)
    same(gate.launcher(*given), gate.oracle(*given))
