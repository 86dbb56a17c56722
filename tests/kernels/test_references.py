"""The references, which are the CPU path, against fp64 written another way."""

import math

import pytest
import torch
from fixtures.kernels.attention_cases import attend, make_case
from fixtures.kernels.checking import DTYPES, Judge, same_bits, short
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.elementwise.activation import gelu_mul, silu_mul
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache

sizes = st.integers(1, 70)
seeds = st.integers(0, 2**31 - 1)
dtypes = st.sampled_from(DTYPES)


def rows(n: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Strided rows: a view of a wider matrix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width + 3, generator=generator).to(dtype)[:, 2 : width + 2]


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, dtypes, seeds)
def test_norms(n: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = (rows(k, width, dtype, seed + i) for i, k in enumerate((n, 1)))
    judge = Judge("norm")

    def norm_in(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
        values = values.to(dtype)
        rms = (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return values / rms * weight[0].to(dtype)

    out = rms_norm(x, weight[0], 1e-6)
    judge.close("rms_norm", out, norm_in(torch.float64, x), norm_in(dtype, x))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_norms_plus_one(dtype: torch.dtype) -> None:
    """The 1 is added in fp32: a weight for which the dtype has no room beside it is kept."""
    x = rows(4, 4096, dtype, 0)
    weight = torch.full((4096,), 0.45 * torch.finfo(dtype).eps, dtype=dtype)
    out = rms_norm(x, weight, 1e-6, plus_one=True).double()
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    if dtype != torch.float32:
        lost = float(weight[0])
        assert abs(float(out.abs().sum() / exact.abs().sum()) - 1) < lost / 4
    assert (out - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, dtypes, seeds)
def test_gated_activations(n: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x = rows(n, 2 * width, dtype, seed)
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + torch.exp(-gate)) * up
    judge = Judge("activations")
    judge.close("silu_mul", silu_mul(x), exact, exact.to(dtype))
    turns = 2 * (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    exact = gate / (1 + torch.exp(-turns)) * up
    gate, up = x.float().chunk(2, -1)
    naive = torch.nn.functional.gelu(gate, approximate="tanh") * up
    judge.close("gelu_mul", gelu_mul(x), exact, naive.to(dtype))
    judge.verdict()


def turned(
    x: torch.Tensor, angle: torch.Tensor, norm: torch.Tensor | None, is_late: bool
) -> torch.Tensor:
    """Complex multiplication of `x [n, heads, d]` by `angle [n, 1, d]`, around a norm."""
    each = 1.0 if norm is None else norm.to(x.dtype)
    if norm is not None:
        each = each / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    (a, b), (cos, sin) = (x if is_late else x * each).chunk(2, -1), angle.to(x.dtype).chunk(2, -1)
    if x.dtype == torch.float64:
        y = torch.complex(a, b) * torch.complex(cos, sin)
        a, b = y.real, y.imag
    else:
        a, b = a * cos - b * sin, b * cos + a * sin
    y = torch.cat((a, b), -1)
    return y * each if is_late else y


@settings(max_examples=40, deadline=None)
@given(st.data(), dtypes, seeds)
def test_rope_and_cache(data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    """Heads are as `turned` has them; the cache changes at the slots alone."""
    torch.manual_seed(seed)
    n, hq, h = (data.draw(st.integers(1, 6)) for _ in range(3))
    d, block = data.draw(st.sampled_from((4, 16, 80))), data.draw(st.sampled_from((8, 16)))
    matrix = torch.randn(n, (hq + 2 * h) * d).to(dtype)
    before = matrix.clone()
    q, k, v = (x.unflatten(1, (-1, d)) for x in matrix.split((hq * d, h * d, h * d), 1))
    angles = torch.rand(9, d // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 9, (n,))
    slots = torch.randperm(4 * block)[:n]
    slots[0] = -1
    cache = torch.full((4, h, 2, block, d), math.nan, dtype=dtype)
    old_q, old_k, old_v = (x.clone() for x in (q, k, v))
    norms = (torch.rand(d).to(dtype), torch.rand(d).to(dtype)) if data.draw(st.booleans()) else ()
    is_late = data.draw(st.booleans())
    factors = torch.rand(9) + 0.5 if data.draw(st.booleans()) and (is_late or not norms) else None
    stages = HeadStages(None, *norms, eps=1e-6, are_late=is_late, factors=factors)
    rope_and_cache(q, k, v, cos_sin, positions, slots, cache, stages)
    angle = cos_sin[positions][:, None]
    last = (torch.ones(9) if factors is None else factors)[positions][:, None, None]
    both = [
        [
            turned(x.to(kind), angle, norm, is_late)
            for x, norm in zip((old_q, old_k), norms or (None,) * 2, strict=True)
        ]
        for kind in (torch.float64, dtype)
    ]
    exact, naive = [(q * last.to(q.dtype), k) for q, k in both]
    judge = Judge("rope")
    judge.close("q", q, exact[0], naive[0])
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            entry = cache[slot // block, :, :, slot % block]
            judge.close("k", entry[:, 0], exact[1][i], naive[1][i])
            judge.true("v", same_bits(entry[:, 1], old_v[i]))
            entry.fill_(math.nan)
    judge.true("elsewhere", bool(cache.isnan().all()))
    judge.true("k, v unchanged", same_bits(matrix[:, hq * d :], before[:, hq * d :]))
    judge.verdict()


@settings(max_examples=40, deadline=None)
@given(st.data(), dtypes, seeds)
def test_attention(data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    """Both kinds of attention over paged caches that hold NaN wherever nothing may be read."""
    h, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    block = data.draw(st.sampled_from((8, 16, 32)))
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    chunks = [data.draw(st.integers(0, min(20, length))) for length in lengths]
    window = data.draw(st.sampled_from((0, 0, 1, 7, 8, 33, 64, 100)))
    shape = ((h * group, h), 16, block, dtype, "cpu", seed, window)
    judge = Judge("attention")
    case = make_case(chunks, lengths, *shape)
    out = prefill_attention(
        case.q,
        case.cache,
        case.block_tables,
        case.query_starts,
        case.lengths,
        case.scale,
        max(chunks),
        window=window,
    )
    judge.close(
        f"prefill {chunks} {lengths}", out, attend(case, torch.float64), attend(case, dtype)
    )
    case = make_case([1] * len(lengths), lengths, *shape)
    plan = plan_decode(case.lengths, case.cache, h * group, window)
    arguments = (case.cache, case.block_tables, case.lengths, plan, case.scale)
    out = decode_attention(case.q, *arguments, window=window)
    name = f"decode {lengths}"
    judge.close(name, out, attend(case, torch.float64), attend(case, dtype))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_judge_sees_errors(dtype: torch.dtype) -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    rounded = exact.to(dtype)
    good = Judge("good")
    good.close("rounding", rounded, exact, rounded)
    assert not good.failures
    for spoil in (lambda x: x * (1 + 16 * torch.finfo(dtype).eps), lambda x: x.roll(1, 0)):
        bad = Judge("bad")
        bad.close("spoilt", spoil(rounded), exact, rounded)
        assert len(bad.failures) == 1
    nan = rounded.clone()
    nan[3, 5] = math.nan
    bad = Judge("bad")
    bad.close("nan", nan, exact, rounded)
    assert "worst at (3, 5)" in bad.failures[0]
