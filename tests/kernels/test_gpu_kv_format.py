"""Quantised caches on a GPU: what is written, byte for byte; attention over what is left."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from fixtures.kernels.attention_cases import attend, in_format, make_case, with_windows
from fixtures.kernels.checking import DTYPES, Judge, poison, same_bits, short
from fixtures.kernels.compiling import compile_all, those_with
from slipstream.kernels.attention import decode as decoding
from slipstream.kernels.attention import prefill as prefilling
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache import unpack as unpacking
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.cache.unpack import unpack_blocks
from slipstream.kernels.elementwise import rope
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache
from slipstream.kernels.runtime import jit

pytestmark = pytest.mark.gpu
by_format = pytest.mark.parametrize("name", FORMATS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)

LENGTHS = [0, 1, 2, 7, 31, 33, 0, 77, 256, 257, 1000, 0, 64, 1100, 0]
CHUNKS = [1, 5, 0, 64, 65, 100, 17, 128, 1, 33, 3]
CHUNK_LENGTHS = [1, 5, 50, 64, 65, 300, 2049, 1000, 777, 33, 259]


def compile_of(module: ModuleType, dtype: torch.dtype, name: str) -> None:
    """What a module has of these."""
    macros = {"SCORES": None, "SINKS": None, "SHARES": None, "ELEMENT": jit.type_name(dtype)}
    compile_all(those_with(module.variants(), **macros, **kv_format.macros(FORMATS[name])))


def legal() -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """Configurations, each with a window or none."""
    return with_windows((0, 77), 3, kv_format.MIN_BLOCK_SIZE)


class Pooled:
    """A judge of many cases. In fp32, where the largest of few errors is chance, of all at once."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._cases: list[tuple[torch.Tensor, ...]] = []

    def close(self, label: str, *results: torch.Tensor) -> None:
        if results[0].dtype == torch.float32:
            self._cases.append(tuple(x.flatten() for x in results))
        else:
            self._judge.close(label, *results)

    def verdict(self) -> None:
        if self._cases:
            out, exact, naive = (torch.cat(parts) for parts in zip(*self._cases, strict=True))
            self._judge.close("all", out, exact, naive)
        self._judge.verdict()


def empty_plan() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32, device="cuda")


def rows_of(dtype: torch.dtype, heads: tuple[int, int], d: int, n: int) -> list[torch.Tensor]:
    """q, k, v of one matrix: small and large rows, outliers, one-sided ones, zeros, NaN."""
    rows = torch.randn((n, (heads[0] + 2 * heads[1]) * d), device="cuda")
    scales = torch.tensor([1.0, 1e-6, 3e4, 40.0, 0.0], device="cuda")
    rows *= scales[torch.arange(n, device="cuda") % 5, None]
    rows[5::7] += 4
    rows[:, ::50] *= 30
    rows[3, -1], rows[8, -d] = float("nan"), float("inf")
    sizes = [count * d for count in (heads[0], heads[1], heads[1])]
    return [x.unflatten(1, (-1, d)) for x in rows.to(dtype).split(sizes, 1)]


@by_format
@by_dtype
def test_what_is_written(dtype: torch.dtype, name: str) -> None:
    """The bytes that the CPU makes of the same K and V; no others change."""
    compile_of(rope, dtype, name)
    judge = Judge(f"rope_and_cache {short(dtype)} {name}")
    for heads, d, block, _ in legal():
        case, n = f"heads {heads} d {d} block {block}", 37
        q, k, v = rows_of(dtype, heads, d, n)
        angles = torch.rand(500, d // 2, device="cuda") * 6.3
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        positions = torch.randint(0, 500, (n,), device="cuda")
        slots = torch.randperm(6 * block, device="cuda")[:n]
        slots[::6] = -1
        norms = [torch.randn(d, device="cuda").to(dtype) for _ in range(2 * (block == 64))]
        stages = HeadStages(None, *norms, eps=1e-5)
        where = (cos_sin, positions, slots)
        plain = torch.zeros((6, heads[1], 2, block, d), dtype=dtype, device="cuda")
        plain_q = q.clone()
        rope_and_cache(plain_q, k, v, *where, plain, stages)
        row = kv_format.row_size(FORMATS[name], d)
        before = torch.randint(0, 255, (6, heads[1], 2, block, row), dtype=torch.uint8)
        kept = slots[slots >= 0]
        at, token = (x.cpu() for x in (kept // block, kept % block))
        want = before.clone()
        numbers = (plain.cpu()[at, :, part, token] for part in (0, 1))
        kv_format.write(want.view(FORMATS[name]), kept.cpu(), *numbers)
        for _ in range(3):
            cache, turned = before.cuda(), q.clone()
            rope_and_cache(turned, k, v, *where, cache.view(FORMATS[name]), stages)
            differing = int((cache.cpu() != want).sum())
            judge.true(f"{case}: {differing} bytes differ", differing == 0)
            judge.true(f"{case}: q", same_bits(turned, plain_q))
    judge.verdict()


@pytest.mark.parametrize("scale", [1e-6, 0.0137, 1.0, 2.7, 2.0**60])
@by_dtype
def test_what_is_written_in_static_scales(dtype: torch.dtype, scale: float) -> None:
    """The CPU's bytes, numbers far beyond the scale among them; V's scale is another."""
    compile_of(rope, dtype, "fp8")
    judge = Judge(f"rope_and_cache {short(dtype)} scale {scale}")
    largest = torch.finfo(dtype).max
    for heads, d, block, _ in legal():
        n = 37
        q, k, v = rows_of(dtype, heads, d, n)
        v[10, 0, 1], v[11, 0, 2] = largest, -largest
        angles = torch.rand(500, d // 2, device="cuda") * 6.3
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        positions = torch.randint(0, 500, (n,), device="cuda")
        slots = torch.randperm(6 * block, device="cuda")[:n]
        plain = torch.zeros((6, heads[1], 2, block, d), dtype=dtype, device="cuda")
        rope_and_cache(q.clone(), k, v, cos_sin, positions, slots, plain)
        at, token = (x.cpu() for x in (slots // block, slots % block))
        static = kv_format.Static(*torch.tensor([scale, scale * 0.7]).tolist())
        shape = (6, heads[1], 2, block, kv_format.row_size(FORMATS["fp8"], d))
        want = torch.zeros(shape, dtype=torch.uint8).view(FORMATS["fp8"])
        numbers = (plain.cpu()[at, :, part, token] for part in (0, 1))
        kv_format.write(want, slots.cpu(), *numbers, static=static)
        cache = torch.zeros(shape, dtype=torch.uint8, device="cuda").view(FORMATS["fp8"])
        rope_and_cache(q, k, v, cos_sin, positions, slots, cache, HeadStages(static=static))
        differing = int((cache.view(torch.uint8).cpu() != want.view(torch.uint8)).sum())
        judge.true(f"heads {heads} d {d} block {block}: {differing} bytes differ", differing == 0)
    judge.verdict()


@by_format
@by_dtype
def test_decode(dtype: torch.dtype, name: str) -> None:
    """Attention equals that over the values that are left in the cache, by plan and by split."""
    compile_of(decoding, dtype, name)
    judge = Judge(f"decode_attention {short(dtype)} {name}")
    pooled = Pooled(judge)
    for heads, d, block, window in legal():
        case = make_case([1] * len(LENGTHS), LENGTHS, heads, d, block, dtype, window=window)
        case, left = in_format(case, FORMATS[name])
        want = (attend(left, torch.float64), attend(left, dtype))

        def run(is_planned: bool, case=case, window=window) -> torch.Tensor:
            poison(case.q.shape, dtype=case.q.dtype)
            plan = empty_plan()
            if is_planned:
                plan = plan_decode(case.lengths, case.cache, case.q.shape[1], window)
            where = (case.cache, case.block_tables, case.lengths, plan, case.scale)
            return decode_attention(case.q, *where, window=window)

        for is_planned in (True, False):
            label = f"heads {heads} d {d} block {block} window {window} planned {is_planned}"
            out = run(is_planned)
            pooled.close(label, out, *want)
            judge.true(f"{label}: length 0", not out[case.lengths == 0].any())
            judge.repeats(label, lambda run=run, is_planned=is_planned: run(is_planned))
    pooled.verdict()


@by_format
@by_dtype
def test_prefill(dtype: torch.dtype, name: str) -> None:
    compile_of(prefilling, dtype, name)
    judge = Judge(f"prefill_attention {short(dtype)} {name}")
    pooled = Pooled(judge)
    for heads, d, block, window in legal():
        case = make_case(CHUNKS, CHUNK_LENGTHS, heads, d, block, dtype, window=window)
        case, left = in_format(case, FORMATS[name])
        label = f"heads {heads} d {d} block {block} window {window}"

        def run(case=case, window=window) -> torch.Tensor:
            poison(case.q.shape, dtype=case.q.dtype)
            where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
            return prefill_attention(case.q, *where, max(CHUNKS), window=window)

        pooled.close(label, run(), attend(left, torch.float64), attend(left, dtype))
        judge.repeats(label, run)
    pooled.verdict()


@by_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_prefill_over_unpacked_blocks(dtype: torch.dtype, name: str) -> None:
    """The copy is the oracle's, bit for bit; attention over it is as near as over packed blocks."""
    plain = {"FORMAT": None, "SCORES": None, "SINKS": None, "ELEMENT": jit.type_name(dtype)}
    compile_all(those_with(prefilling.variants(), **plain))
    compile_of(unpacking, dtype, name)
    judge = Judge(f"unpack_blocks {short(dtype)} {name}")
    for heads, d, block, window in legal():
        case = make_case(CHUNKS, CHUNK_LENGTHS, heads, d, block, dtype, window=window)
        case, left = in_format(case, FORMATS[name])
        label = f"heads {heads} d {d} block {block} window {window}"
        contexts = list(zip(case.chunks, CHUNK_LENGTHS, strict=True))
        count = unpacking.num_seen_blocks(contexts, block, window)
        shape = (count + 1, *case.cache.shape[1:4], d)

        def run(case=case, shape=shape, count=count, window=window) -> tuple[torch.Tensor, ...]:
            into = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
            tables = torch.full_like(case.block_tables, 2**30)
            where = (case.cache, case.block_tables, case.query_starts, case.lengths)
            unpack_blocks(*where, into, tables, window, count)
            poison(case.q.shape, dtype=case.q.dtype)
            where = (into, tables, case.query_starts, case.lengths, case.scale)
            return into, tables, prefill_attention(case.q, *where, max(CHUNKS), window=window)

        into, tables, out = run()
        wanted = torch.full_like(into, torch.nan), torch.full_like(tables, 2**30)
        where = (case.cache, case.block_tables, case.query_starts, case.lengths)
        unpack_blocks.oracle(*where, *wanted, window)
        is_same = (into == wanted[0]) | (into.isnan() & wanted[0].isnan())
        judge.true(f"{label}: the copy", bool(is_same.all()))
        judge.true(f"{label}: the tables", torch.equal(tables, wanted[1]))
        judge.close(label, out, attend(left, torch.float64), attend(left, dtype))
        judge.repeats(label, lambda run=run: run()[2])
    judge.verdict()


@by_format
@by_dtype
def test_chunks_change_nothing(dtype: torch.dtype, name: str) -> None:
    """A prompt cut anywhere gives a row the same bits; so do neighbours and the table's width."""
    judge = Judge(f"chunk cuts {short(dtype)} {name}")
    length = 700
    for heads, d in (((6, 2), 64), ((6, 2), 80), ((7, 1), 128), ((4, 2), 256)):
        case, _ = in_format(make_case([length], [length], heads, d, 16, dtype), FORMATS[name])

        def rows(begin: int, end: int, case=case) -> torch.Tensor:
            starts, lengths = case.lengths.new_tensor([0, end - begin]), case.lengths - length + end
            where = (case.cache, case.block_tables, starts, lengths, case.scale, end - begin)
            return prefill_attention(case.q[begin:end], *where)

        whole = rows(0, length)
        for size in (1, 33, 64, 127, 300):
            for begin in range(0, length, max(size, 7)):  # places in tiles of every kind
                end = min(length, begin + size)
                judge.true(f"d {d} {begin}:{end}", same_bits(rows(begin, end), whole[begin:end]))
        case, _ = in_format(make_case([1] * 15, LENGTHS, heads, d, 32, dtype), FORMATS[name])
        where = (case.block_tables, case.lengths)
        out = decode_attention(case.q, case.cache, *where, empty_plan(), case.scale)
        for s, size in enumerate(LENGTHS):
            own = (case.block_tables[s : s + 1, : max(1, -(-size // 32))], case.lengths[s : s + 1])
            own = tuple(x.contiguous() for x in own)
            alone = decode_attention(case.q[s : s + 1], case.cache, *own, empty_plan(), case.scale)
            judge.true(f"d {d} alone, length {size}", same_bits(alone[0], out[s]))
    judge.verdict()


@by_format
@pytest.mark.parametrize("block", [16, 64, 256])
def test_the_newest_token_is_seen(name: str, block: int) -> None:
    """The kernel in front writes it, and its scale, while attention already reads what is older."""
    judge = Judge(f"newest token {name} block {block}")
    for length in (1, 32, 33, 200, 1000):
        plain = make_case([1] * 4, [length] * 4, (8, 2), 128, block, torch.bfloat16)
        case, _ = in_format(plain, FORMATS[name])
        k, v = torch.randn((2, 4, 2, 128), device="cuda").bfloat16().unbind()
        cos_sin = torch.rand((length, 128), device="cuda")
        positions = case.lengths.long() - 1
        blocks = case.block_tables.long().gather(1, (positions // block)[:, None])[:, 0]
        slots = blocks * block + positions % block
        plan = plan_decode(case.lengths, case.cache, 8)
        source = case.q.clone()

        def step(case=case, rows=(k, v, cos_sin, positions, slots), plan=plan, source=source):
            case.q.copy_(source)
            rope_and_cache(case.q, *rows, case.cache)
            where = (case.cache, case.block_tables, case.lengths, plan, case.scale)
            return decode_attention(case.q, *where)

        want = step().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        # The scale of the newest token is NaN until it is written.
        scales = kv_format.numbers_and_scales(case.cache)[1]
        for _ in range(20):
            scales[slots // block, :, :, positions % block, 0] = 255
            graph.replay()
            judge.true(f"length {length}", same_bits(out, want))
    judge.verdict()
