"""The cache's formats: what a number may lose, what a row holds, what lies where."""

import math

import pytest
import torch
from fixtures.kernels.attention_cases import attend, in_format, make_case
from fixtures.kernels.checking import Judge
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.kv_format import FORMATS, Static
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache
from slipstream.kernels.runtime.op import KernelError

STEP = 1.125  # a scale is at most so much larger than it need be
formats = st.sampled_from(list(FORMATS))
seeds = st.integers(0, 2**31 - 1)
by_format = pytest.mark.parametrize("name", FORMATS)


def bound(name: str, x: torch.Tensor) -> torch.Tensor:
    """What each number may be wrong by."""
    if name == "int4":
        groups = x.unflatten(-1, (kv_format.num_groups(x.shape[-1]), -1))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = torch.maximum((high - low) / 15, torch.maximum(-low, high) / 127)
        allowed = (0.5 * STEP * scale).expand(groups.shape).flatten(-2)
    else:
        largest = x.abs().amax(-1, keepdim=True)
        allowed = 0.5 * STEP * largest / 127
        if name == "fp8":  # three bits of mantissa; below 2 ** -6 of the scale, steps of 2 ** -9
            allowed = torch.maximum(x.abs() / 16, STEP * largest / 448 * 2**-10)
    return allowed * 1.00001 + 2**-22


@settings(max_examples=150, deadline=None)
@given(
    formats,
    st.sampled_from((2, 16, 64, 80, 96, 128, 256)),
    st.integers(1, 9),
    st.integers(-12, 5),
    st.sampled_from((0, 1, 30)),
    seeds,
)
def test_errors(
    name: str, head_size: int, count: int, exponent: int, outlier: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, head_size, generator=generator)
    x[..., seed % head_size] *= 1 + outlier
    if seed % 3 == 0:
        x += 3  # all on one side
    x *= 2.0**exponent
    numbers, scales = kv_format.quantize(x, FORMATS[name])
    assert numbers.shape[-1] + scales.shape[-1] == kv_format.row_size(FORMATS[name], head_size)
    error = (kv_format.dequantize(numbers, scales, FORMATS[name]) - x).abs()
    assert bool((error <= bound(name, x)).all())
    again = kv_format.quantize(x[:1], FORMATS[name])
    assert all(torch.equal(a, b[:1]) for a, b in zip(again, (numbers, scales), strict=True))


@by_format
def test_zero_is_zero_and_too_large_is_cut_off(name: str) -> None:
    for value, low, high in ((0.0, 0.0, 0.0), (1e-30, 0.0, 1e-6), (-3e5, -4e5, -1e5)):
        x = torch.full((1, 1, 64), value)
        got = kv_format.dequantize(*kv_format.quantize(x, FORMATS[name]), FORMATS[name])
        assert bool(((got >= low) & (got <= high)).all()), (value, got)


@by_format
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_stays_with_its_scale(name: str, bad: float) -> None:
    x = torch.randn(3, 2, 128)
    want = kv_format.dequantize(*kv_format.quantize(x, FORMATS[name]), FORMATS[name])
    x[1, 0, 70] = bad
    got = kv_format.dequantize(*kv_format.quantize(x, FORMATS[name]), FORMATS[name])
    spoilt = torch.zeros(3, 2, 128, dtype=torch.bool)
    spoilt[1, 0, 64 if name == "int4" else 0 :] = True
    assert bool(got[spoilt].isnan().all())
    assert torch.equal(got[~spoilt], want[~spoilt])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(-12, 12), st.floats(2.0**-20, 2.0**10), seeds)
def test_static_scales(count: int, exponent: int, scale: float, seed: int) -> None:
    """e4m3 of the numbers over the scale, saturating, whatever their neighbours."""
    x = torch.randn(count, 2, 48, generator=torch.Generator().manual_seed(seed))
    x *= 2.0**exponent
    exact = torch.tensor(scale).item()
    numbers, scales = kv_format.quantize(x, torch.float8_e4m3fn, exact)
    want = (x / torch.tensor(exact)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(numbers, want.view(torch.uint8))
    assert torch.equal(kv_format.dequantize(numbers, scales, want.dtype), want.float())
    x[0, 1, 3] = (math.nan, math.inf, -math.inf)[seed % 3]
    got = kv_format.dequantize(*kv_format.quantize(x, want.dtype, exact), want.dtype)
    assert bool(got[0, 1].isnan().all())
    assert torch.equal(got[1:], want[1:].float())
    assert torch.equal(got[0, 0], want[0, 0].float())


@by_format
@pytest.mark.parametrize("head_size", [2, 16, 64, 80, 96, 112, 128, 256])
def test_rows_and_slots(name: str, head_size: int) -> None:
    """Tokens go to their slots, and no other byte changes."""
    dtype = FORMATS[name]
    shape = (5, 2, 2, 16, kv_format.row_size(dtype, head_size))
    before = torch.randint(0, 255, shape, dtype=torch.uint8)
    cache = before.clone().view(dtype)
    assert kv_format.head_size_of(cache) == head_size
    k, v = torch.randn(2, 4, 2, head_size).unbind()
    slots = torch.tensor([3, 79, 16, 40])
    kv_format.write(cache, slots, k, v)
    read = kv_format.read(cache)
    for part, x in enumerate((k, v)):
        want = kv_format.dequantize(*kv_format.quantize(x, dtype), dtype)
        assert torch.equal(read[slots // 16, :, part, slots % 16], want)
    old = kv_format.read(before.view(dtype))
    mine = torch.zeros(80, dtype=torch.bool)
    mine[slots] = True
    others = (~mine).view(5, 16)
    same = torch.eq(read, old) | (read.isnan() & old.isnan())
    assert bool(same.permute(0, 3, 1, 2, 4)[others].all())


@by_format
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_numbers_come_first(name: str, head_size: int, heads: int) -> None:
    """A block is all its numbers, then all their scales: so copies of numbers begin at lines."""
    row = kv_format.row_size(FORMATS[name], head_size)
    cache = torch.zeros((4, heads, 2, 16, row), dtype=FORMATS[name])
    numbers, scales = kv_format.numbers_and_scales(cache)
    assert numbers.dtype == scales.dtype == torch.uint8
    for block in range(4):
        first = block * cache[0].numel()
        behind = first + numbers[block].numel()
        assert numbers[block].is_contiguous()
        assert numbers[block].storage_offset() == first
        assert scales[block].is_contiguous()
        assert scales[block].storage_offset() == behind
        assert behind + scales[block].numel() == first + cache[0].numel()


@by_format
def test_blocks_in_pieces_are_refused(name: str) -> None:
    """Their scales lie elsewhere: some heads would be read wrong, or written to a copy."""
    cache = torch.zeros((3, 4, 2, 16, kv_format.row_size(FORMATS[name], 64)), dtype=FORMATS[name])
    x, slots = torch.ones(1, 2, 64), torch.tensor([17])
    for pieces in (cache[:, 1:3], cache[:, :, :, :8], cache.transpose(1, 2), cache[0, :, 0]):
        with pytest.raises(KernelError, match="quantised blocks must be whole"):
            kv_format.read(pieces)
    with pytest.raises(KernelError, match="quantised blocks must be whole"):
        kv_format.write(cache[:, :2], slots, x, x)


@by_format
def test_caches_of_several_layers_and_single_blocks_are_read(name: str) -> None:
    cache = torch.zeros((3, 2, 2, 16, kv_format.row_size(FORMATS[name], 128)), dtype=FORMATS[name])
    kv_format.write(cache, torch.arange(48), *torch.randn(2, 48, 2, 128).unbind())
    read = kv_format.read(cache)
    assert torch.equal(kv_format.read(cache[None]), read[None])
    assert torch.equal(kv_format.read(cache[1]), read[1])
    assert torch.equal(kv_format.read(cache[1:2]), read[1:2])
    assert torch.equal(kv_format.read(cache[:0]), read[:0])


@by_format
def test_heads_may_have_blocks_of_their_own(name: str) -> None:
    """Block b of head h is `b * heads + h`; in as many bytes."""
    shape = (3, 2, 2, 16, kv_format.row_size(FORMATS[name], 64))
    whole, pages = (torch.zeros(shape, dtype=FORMATS[name]) for _ in range(2))
    slots, (k, v) = torch.tensor([3, 40, 31]), torch.randn(2, 3, 2, 64).unbind()
    kv_format.write(whole, slots, k, v)
    by_head = pages.view(-1, 1, *shape[2:])
    kv_format.write(by_head, slots, k, v)
    read = kv_format.read(by_head)
    assert torch.equal(read.view(3, 2, *read.shape[2:]), kv_format.read(whole))


def test_what_fits() -> None:
    """Against 16 bits, the scales counted."""
    for name, wanted in (("fp8", 1.95), ("int8", 1.95), ("int4", 3.5)):
        for head_size in (64, 80, 96, 128, 256):
            assert 2 * head_size / kv_format.row_size(FORMATS[name], head_size) >= wanted


@settings(max_examples=25, deadline=None, derandomize=True)  # a largest error is a matter of luck
@given(st.data(), formats, st.sampled_from((torch.float32, torch.bfloat16)), seeds)
def test_attention(data: st.DataObject, name: str, dtype: torch.dtype, seed: int) -> None:
    """Attention equals that over the values in the cache; NaN wherever nothing may be read."""
    h, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    head_size = data.draw(st.sampled_from((16, 64, 80)))
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    chunks = [data.draw(st.integers(0, min(20, length))) for length in lengths]
    window = data.draw(st.sampled_from((0, 0, 17, 33)))
    shape = ((h * group, h), head_size, 16, dtype, "cpu", seed, window)
    judge = Judge(name)
    case, plain = in_format(make_case(chunks, lengths, *shape), FORMATS[name])
    where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
    out = prefill_attention(case.q, *where, max(chunks), window=window)
    judge.close("prefill", out, attend(plain, torch.float64), attend(plain, dtype))
    case, plain = in_format(make_case([1] * len(lengths), lengths, *shape), FORMATS[name])
    plan = plan_decode(case.lengths, case.cache, h * group, window)
    where = (case.cache, case.block_tables, case.lengths, plan, case.scale)
    out = decode_attention(case.q, *where, window=window)
    judge.close("decode", out, attend(plain, torch.float64), attend(plain, dtype))
    judge.verdict()


@by_format
def test_decode_writes_what_rope_and_cache_writes(name: str) -> None:
    case, _ = in_format(
        make_case([1, 1], [20, 33], (4, 2), 64, 16, torch.bfloat16, "cpu"), FORMATS[name]
    )
    other = case.cache.clone()
    k, v = torch.randn(2, 2, 2, 64).bfloat16().unbind()
    angles = torch.rand(40, 32) * 6
    newest = Newest(k, v, torch.cat((angles.cos(), angles.sin()), 1))
    positions = case.lengths.long() - 1
    slots = case.block_tables.long()[torch.arange(2), positions // 16] * 16 + positions % 16
    q = case.q.clone()
    rope_and_cache(q, *newest, positions, slots, other)
    plan = plan_decode(case.lengths, case.cache, 4)
    where = (case.block_tables, case.lengths, plan, case.scale)
    got = decode_attention(case.q, case.cache, *where, newest=newest)
    assert torch.equal(case.cache.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(got, decode_attention(q, other, *where))


def test_static_scales_are_of_fp8() -> None:
    x, cos_sin, where = torch.randn(1, 2, 64), torch.ones(1, 64), torch.zeros(1, dtype=torch.long)
    stages = HeadStages(static=Static(1.0, 1.0))
    for name in ("int8", "int4"):
        row = kv_format.row_size(FORMATS[name], 64)
        cache = torch.zeros((1, 2, 2, 16, row), dtype=FORMATS[name])
        with pytest.raises(KernelError, match="static scales for a cache of"):
            rope_and_cache(x, x, x, cos_sin, where, where, cache, stages)


def test_a_cache_of_other_heads_is_refused() -> None:
    case = make_case([1], [9], (2, 2), 16, 16, torch.float16, "cpu")
    plan = plan_decode(case.lengths, case.cache, 2)
    where = (case.block_tables, case.lengths, plan, 0.25)
    with pytest.raises(KernelError, match=r"a cache of torch\.float32 for torch\.float16"):
        decode_attention(case.q, case.cache.float(), *where)
    wrong = torch.zeros((3, 2, 2, 16, 33), dtype=torch.int8)
    with pytest.raises(KernelError, match="rows of 33 do not hold heads of 16"):
        decode_attention(case.q, wrong, *where)


@pytest.mark.parametrize("scale", [0.0, -0.125, math.nan])
def test_scores_have_a_positive_scale(scale: float) -> None:
    case = make_case([1], [3], (2, 1), 16, 16, torch.float32, device="cpu")
    plan = plan_decode(case.lengths, case.cache, 2)
    with pytest.raises(KernelError, match="scale is"):
        decode_attention(case.q, case.cache, case.block_tables, case.lengths, plan, scale)
