"""Decode attention in every legal configuration: against fp64, poisoned, repeated bitwise."""

import dataclasses

import pytest
import torch
from fixtures.kernels.attention_cases import (
    Case,
    attend,
    configurations,
    make_case,
    with_windows,
)
from fixtures.kernels.checking import DTYPES, Judge, poison, same_bits, short
from fixtures.kernels.compiling import compile_all, those_with
from fixtures.kernels.newest import HALVES, newest_of
from slipstream.kernels.attention import decode as module
from slipstream.kernels.attention import decode_shapes
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.decode_shapes import part_words
from slipstream.kernels.elementwise.rope import rope_and_cache

pytestmark = pytest.mark.gpu

LENGTHS = [1, 2, 7, 31, 33, 0, 77, 256, 257, 1000, 1100, 64, 5000, 8193]
SHORT = [0, 1, 2, 7, 31, 33, 0, 77, 256, 257, 1000, 0, 64, 1100, 0]
LONG = [9001, 300, 0, 5000, 1]


shapes_of = decode_shapes.shapes  # as they are, whatever a test makes of them


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All that is tested here."""
    plain = {"FORMAT": None, "SCORES": None, "SINKS": None, "SHARES": None}
    compile_all(those_with(module.variants(), **plain))


def decode(case: Case, poisoned: bool = False) -> torch.Tensor:
    if poisoned:
        poison(case.q.shape, dtype=case.q.dtype)
        num_ctas = torch.cuda.get_device_properties(0).multi_processor_count
        for warps in (2, 4, 8):
            poison((module._plan_size(len(case.lengths), num_ctas, warps),), dtype=torch.float32)
        poison((num_ctas * 2 * part_words(case.q.shape[2]),), dtype=torch.float32)
    plan = plan_decode(case.lengths, case.cache, case.q.shape[1], case.window)
    where = (case.cache, case.block_tables, case.lengths, plan, case.scale)
    return decode_attention(case.q, *where, window=case.window)


def check(judge: Judge, name: str, case: Case) -> None:
    out = decode(case, poisoned=True)
    judge.close(name, out, attend(case, torch.float64), attend(case, case.q.dtype))
    judge.true(f"{name}: length 0", not out[case.lengths == 0].any())
    judge.repeats(name, lambda: decode(case, poisoned=True))


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_decode_attention(dtype: torch.dtype) -> None:
    judge = Judge(f"decode_attention {short(dtype)}")
    for heads, d, block in configurations()[:: 1 if dtype == torch.bfloat16 else 4]:
        case = make_case([1] * len(SHORT), SHORT, heads, d, block, dtype)
        check(judge, f"heads {heads} d {d} block {block}", case)
    for heads, d, block in (((8, 2), 128, 32), ((7, 1), 80, 8), ((8, 4), 256, 32)):
        case = make_case([1] * len(LONG), LONG, heads, d, block, dtype)
        check(judge, f"long, heads {heads} d {d} block {block}", case)
    judge.verdict()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_windows(dtype: torch.dtype) -> None:
    """By plan and by split; no entry in front of a window is read."""
    judge = Judge(f"windows {short(dtype)}")
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    for heads, d, block, window in with_windows((1, 33, 256, 1000), 2):
        case = make_case([1] * len(SHORT), SHORT, heads, d, block, dtype, window=window)
        want = (attend(case, torch.float64), attend(case, dtype))
        name = f"heads {heads} d {d} block {block} window {window}"
        judge.close(name, decode(case, poisoned=True), *want)
        judge.repeats(name, lambda case=case: decode(case, poisoned=True))
        where = (case.cache, case.block_tables, case.lengths, none, case.scale)
        judge.close(f"{name} split", decode_attention(case.q, *where, window=window), *want)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_without_a_plan(dtype: torch.dtype) -> None:
    """Neighbours and the table's width change no bit."""
    judge = Judge(f"by split {short(dtype)}")
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    for heads, d, block in configurations()[:: 8 if dtype == torch.float32 else 12]:
        name = f"heads {heads} d {d} block {block}"
        case = make_case([1] * len(LENGTHS), LENGTHS, heads, d, block, dtype)

        def run(case: Case = case) -> torch.Tensor:
            poison(case.q.shape, dtype=dtype)
            return decode_attention(
                case.q, case.cache, case.block_tables, case.lengths, none, case.scale
            )

        out = run()
        judge.close(name, out, attend(case, torch.float64), attend(case, dtype))
        judge.repeats(name, run)
        for s, length in enumerate(LENGTHS):
            tables = case.block_tables[s : s + 1, : max(1, -(-length // block))].contiguous()
            alone = decode_attention(
                case.q[s : s + 1], case.cache, tables, case.lengths[s : s + 1], none, case.scale
            )
            judge.true(f"{name}: alone, length {length}", same_bits(alone[0], out[s]))
    judge.verdict()


def test_smaller_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of a CTA for other GPUs."""
    judge = Judge("smaller shapes")
    for d in (80, 128, 256):
        case = make_case([1] * len(SHORT), SHORT, (8, 2), d, 16, torch.bfloat16)
        for shape in shapes_of(torch.bfloat16, d)[1:]:
            monkeypatch.setattr(decode_shapes, "shapes", lambda *_, shape=shape: (shape,))
            module._device.cache_clear()
            check(judge, f"{shape} d {d}", case)
    module._device.cache_clear()
    judge.verdict()


@pytest.mark.parametrize("lengths", [[0] * 3, [1], [5000], [384] * 32, [300] * 600, [0, 999] * 50])
def test_the_plan_covers_every_tile_once(lengths: list[int]) -> None:
    """Workers one after the other walk all tiles in order; CTAs agree on what they share."""
    cache = torch.empty((1, 2, 2, 16, 64), dtype=torch.float16, device="cuda")
    plan = plan_decode(torch.tensor(lengths, dtype=torch.int32, device="cuda"), cache, 24).tolist()
    num_ctas, shape = module._device(0, torch.float16, 64)
    shares_at = -(-num_ctas // 4) * 4
    starts_at = shares_at + 8 * num_ctas
    tiles = [
        (row, head, tile)
        for row, length in enumerate(lengths)
        for head in range(4)  # 12 query heads to a kv head are two heads
        for tile in range(-(-length // 32))
    ]
    assert not any(plan[:num_ctas])
    done, owners = 0, {}
    for worker in range(num_ctas * shape.warps):
        _, head, tile, count, row, length = plan[starts_at + 8 * worker :][:6]
        if count:
            assert (row, head, tile) == tiles[done]
            assert length == lengths[row]
        for row, head, _ in tiles[done : done + count]:
            owners.setdefault((row, head), []).append(worker // shape.warps)
        done += count
    assert done == len(tiles)
    told = set()
    for cta in range(num_ctas):
        before, after = (plan[shares_at + 8 * cta + i :][:4] for i in (0, 4))
        for first, last, row, head in (before, after):
            if first < last:
                assert (first, last) == (owners[row, head][0], owners[row, head][-1])
                assert first <= cta <= last
        if after[0] < after[1]:
            told.add((after[2], after[3]))
    assert told == {key for key, ctas in owners.items() if ctas[0] < ctas[-1]}


def random_case(lengths: list[int], heads: tuple[int, int], block: int, dtype: torch.dtype) -> Case:
    """Made on the GPU; nothing is NaN."""
    counts = [-(-length // block) for length in lengths]
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    order = torch.randperm(sum(counts), dtype=torch.int32)
    for s, ids in enumerate(order.split(counts)):
        tables[s, : len(ids)] = ids
    shape = (sum(counts), heads[1], 2, block, 128)
    return Case(
        torch.randn((len(lengths), heads[0], 128), dtype=dtype, device="cuda"),
        torch.randn(shape, dtype=dtype, device="cuda"),
        tables.cuda(),
        torch.empty(0),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        [1] * len(lengths),
    )


MIXES = [
    [2048] * 64,
    [1] * 64,
    [0] * 64,
    [200] + [0] * 63,
    [0] * 63 + [2048],
    [384] * 32 + [0] * 32,
    [0, 2048, 0, 1] * 16,
    [32 * i for i in range(64)],
    [31 * (63 - i) + 1 for i in range(62)] + [0, 0],
    [2048] * 3 + [17] * 61,
    [1000] * 17 + [0] * 47,
    [256] * 64,
]


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_one_graph_for_every_mix(dtype: torch.dtype) -> None:
    """Lengths change in place; what a mix does not use is NaN."""
    judge = Judge(f"one graph {short(dtype)}")
    case = random_case([2048] * 64, (8, 2), 16, dtype)
    values = case.cache.clone()
    decode(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_decode(case.lengths, case.cache, 8)
        arguments = (case.cache, case.block_tables, case.lengths, plan, case.scale)
        layers = [decode_attention(case.q, *arguments) for _ in range(3)]
    positions = torch.arange(2048, device="cuda")
    slots = case.block_tables.long()[:, positions // 16] * 16 + positions % 16
    for number, lengths in enumerate(MIXES):
        case.lengths.copy_(torch.tensor(lengths))
        case.q.normal_()
        unused = torch.ones(len(values) * 16, dtype=torch.bool, device="cuda")
        unused[slots[positions < case.lengths[:, None]]] = False
        case.cache.copy_(
            values.masked_fill(unused.view(-1, 1, 1, 16, 1).expand(values.shape), float("nan"))
        )
        plan.fill_(-1)
        for out in layers:
            out.fill_(float("nan"))
        graph.replay()
        judge.close(f"mix {number}", layers[0], attend(case, torch.float64), attend(case, dtype))
        eager = decode(case, poisoned=True)
        for out in layers:
            judge.true(f"mix {number}: bits", same_bits(out, eager))
    judge.verdict()


@pytest.mark.parametrize("lengths", [[384] * 256, [32768] + [300] * 200, [16384] * 16], ids=len)
def test_large_batches_repeat(lengths: list[int]) -> None:
    """150 runs, in graphs where they overlap, have the bits of the first."""
    judge = Judge(f"{len(lengths)} sequences")
    case = random_case(lengths, (32, 8), 32, torch.bfloat16)
    first = decode(case)
    few = [0, 1, len(lengths) // 2, len(lengths) - 1]
    some = dataclasses.replace(
        case,
        q=case.q[few],
        block_tables=case.block_tables[few],
        lengths=case.lengths[few],
        chunks=[1] * len(few),
    )
    judge.close("some", first[few], attend(some, torch.float64), attend(some, torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_decode(case.lengths, case.cache, 32)
        arguments = (case.cache, case.block_tables, case.lengths, plan, case.scale)
        layers = [decode_attention(case.q, *arguments) for _ in range(15)]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10):
        for out in layers:
            out.fill_(float("nan"))
        graph.replay()
        for out in layers:
            differing += (out.view(torch.int16) != first.view(torch.int16)).any()
    judge.true(f"{int(differing)} of 150 differ", int(differing) == 0)
    judge.verdict()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_rotation_and_cache_within(dtype: torch.dtype) -> None:
    """Attention does what `rope_and_cache` would; where it writes, the cache is NaN before."""
    judge = Judge(f"rotation within {short(dtype)}")
    for heads, d, block in configurations()[:: 1 if dtype == torch.bfloat16 else 4]:
        case = make_case([1] * len(SHORT), SHORT, heads, d, block, dtype)
        newest, positions, slots = newest_of(case, heads[1])
        keep = slots >= 0
        case.cache[slots[keep] // block, :, :, slots[keep] % block] = float("nan")
        before, q = case.cache.clone(), case.q.clone()
        turned = dataclasses.replace(case, q=case.q.clone(), cache=before.clone())
        rope_and_cache(turned.q, *newest, positions, slots, turned.cache)
        name = f"heads {heads} d {d} block {block}"
        outs = []
        for _ in range(5):
            case.cache.copy_(before)
            plan = plan_decode(case.lengths, case.cache, case.q.shape[1])
            poison(case.q.shape, dtype=dtype)
            arguments = (case.cache, case.block_tables, case.lengths, plan, case.scale)
            outs.append(decode_attention(case.q, *arguments, newest=newest))
        judge.close(name, outs[0], attend(turned, torch.float64), attend(turned, dtype))
        judge.true(f"{name}: repeats", all(same_bits(out, outs[0]) for out in outs))
        judge.true(f"{name}: q", same_bits(case.q, q))
        judge.true(f"{name}: v", same_bits(case.cache[:, :, 1], turned.cache[:, :, 1]))
        got, want = case.cache[:, :, 0], turned.cache[:, :, 0]
        judge.true(f"{name}: k, NaN", bool((got.isnan() == want.isnan()).all()))
        got, want = got.nan_to_num(0), want.nan_to_num(0)
        judge.true(f"{name}: k", torch.allclose(got, want, torch.finfo(dtype).eps, 1e-5))
    judge.verdict()


@pytest.mark.parametrize("is_within", [False, True])
def test_the_newest_token_is_seen(is_within: bool) -> None:
    """The kernel in front writes it while attention already reads what is older."""
    judge = Judge("newest token")
    for length in (1, 32, 33, 200, 1000):
        case = random_case([length] * 4, (8, 2), 32, torch.bfloat16)
        plan = plan_decode(case.lengths, case.cache, 8)
        newest, positions, slots = newest_of(case, 2)
        source = case.q.clone(), newest.k.clone(), newest.v.clone()

        def step(case=case, plan=plan, newest=newest, where=(positions, slots), source=source):
            for target, x in zip((case.q, newest.k, newest.v), source, strict=True):
                target.copy_(x)
            arguments = (case.cache, case.block_tables, case.lengths, plan, case.scale)
            if is_within:
                return decode_attention(case.q, *arguments, newest=newest)
            rope_and_cache(case.q, *newest, *where, case.cache)
            return decode_attention(case.q, *arguments)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [step() for _ in range(8)]
        for _ in range(5):
            for x in source:
                x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            case.q.copy_(source[0])
            rope_and_cache(case.q, *newest, positions, slots, case.cache)
            torch.cuda.synchronize()
            want, got = decode(case).float(), torch.stack(outs).float()
            judge.true(f"length {length}", torch.allclose(got, want.expand_as(got), atol=0.02))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_streams(dtype: torch.dtype) -> None:
    """Kernels run on torch's current stream."""
    case = make_case([1] * 4, [300, 1, 1000, 64], (8, 2), 128, 32, dtype)
    want = decode(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-2
        got = decode(case)
    stream.synchronize()
    assert same_bits(got, want)
