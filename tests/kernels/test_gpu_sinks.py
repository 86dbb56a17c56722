"""Attention of sequences that stream, on a GPU: against fp64, poisoned, repeated bitwise."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fixtures.kernels.attention_cases import configurations
from fixtures.kernels.checking import DTYPES, Judge, poison, same_bits, short
from fixtures.kernels.sink_cases import SinkCase, attend_sinks, make_sink_case
from slipstream.kernels.attention import decode as decoding
from slipstream.kernels.attention import sinks
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.decode_shapes import part_words
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.sinks import Sinks, sink_attention
from slipstream.kernels.elementwise.rope import rope_and_cache
from slipstream.kernels.runtime import jit

pytestmark = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)
CONFIGURATIONS = [case for case in configurations() if not jit.has_large_heads(case[1])]
LENGTHS = [0, 1, 2, 7, 31, 33, 0, 77, 256, 257, 1000, 0, 64, 1100, 0]
WINDOWS = [(24, 4), (1, 0), (64, 63), (300, 40), (700, 4), (2000, 130)]
CHUNKS = [1, 5, 0, 64, 65, 100, 17, 40, 1]
CHUNK_LENGTHS = [1, 5, 50, 64, 65, 300, 449, 500, 77]


def wanted(dtype: torch.dtype, head_sizes: set[int]) -> list[jit.Variant]:
    """The shape of this GPU alone."""
    shapes = {d: str(decoding._device(0, dtype, d)[1].slots) for d in head_sizes}
    return [
        v
        for v in [*decoding.variants(), *sinks.variants()]
        if ("SINKS", "1") in v.defines
        and ("ELEMENT", jit.type_name(dtype)) in v.defines
        and "FORMAT" not in dict(v.defines)
        and int(dict(v.defines)["HEAD_SIZE"]) in head_sizes
        and dict(v.defines).get("SLOTS") in (None, shapes[int(dict(v.defines)["HEAD_SIZE"])])
        and dict(v.defines).get("WARPS") != "4" * ("SLOTS" in dict(v.defines))
    ]


def compile_all(dtype: torch.dtype, head_sizes: set[int]) -> None:
    arch = jit._architecture(0)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: jit.cubin_path(one, arch), wanted(dtype, head_sizes)))


def decode(x: SinkCase, newest: Newest | None = None) -> torch.Tensor:
    case = x.case
    poison(case.q.shape, dtype=case.q.dtype)
    num_ctas = torch.cuda.get_device_properties(0).multi_processor_count
    for warps in (4, 8):
        poison((decoding._plan_size(len(case.lengths), num_ctas, warps),), dtype=torch.float32)
    poison((num_ctas * 2 * part_words(case.q.shape[2]),), dtype=torch.float32)
    heads = case.q.shape[1]
    plan = plan_decode(case.lengths, case.cache, heads, x.window, num_sinks=x.num_sinks)
    where = (case.cache, case.block_tables, case.lengths, plan, case.scale)
    first = Sinks(x.angles, x.num_sinks)
    return decode_attention(case.q, *where, newest=newest, window=x.window, sinks=first)


def chunks(x: SinkCase) -> torch.Tensor:
    case = x.case
    poison(case.q.shape, dtype=case.q.dtype)
    where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
    most = max(case.chunks)
    return sink_attention(case.q, x.angles, x.positions, *where, most, x.window, x.num_sinks)


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_decodes(dtype: torch.dtype) -> None:
    cases = CONFIGURATIONS[:: 3 if dtype == torch.bfloat16 else 7]
    compile_all(dtype, {d for _, d, _ in cases})
    judge = Judge(f"decodes that stream {short(dtype)}")
    for number, (heads, d, block) in enumerate(cases):
        for window, num_sinks in WINDOWS[number % 2 :: 2]:
            name = f"heads {heads} d {d} block {block} window {window} sinks {num_sinks}"
            x = make_sink_case([1] * 15, LENGTHS, heads, d, block, dtype, window, num_sinks)
            out = decode(x)
            judge.close(name, out, attend_sinks(x, torch.float64), attend_sinks(x, dtype))
            judge.true(f"{name}: length 0", not out[x.case.lengths == 0].any())
            judge.repeats(name, lambda x=x: decode(x))
            judge.close(
                f"{name} as chunks",
                chunks(x)[1:6],
                *(attend_sinks(x, t)[1:6] for t in (torch.float64, dtype)),
            )
    judge.verdict()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_rotation_and_cache_within(dtype: torch.dtype) -> None:
    """Attention does what `rope_and_cache` would, by each row's own angles."""
    cases = CONFIGURATIONS[:: 5 if dtype == torch.bfloat16 else 7]
    compile_all(dtype, {d for _, d, _ in cases})
    judge = Judge(f"streaming, rotation within {short(dtype)}")
    for number, (heads, d, block) in enumerate(cases):
        window, num_sinks = WINDOWS[number % len(WINDOWS)]
        x = make_sink_case([1] * 15, LENGTHS, heads, d, block, dtype, window, num_sinks)
        case, name = x.case, f"heads {heads} d {d} block {block} window {window} {num_sinks}"
        rows = torch.randn((15, 2 * heads[1] * d + 8), device="cuda").to(dtype)
        k, v = (
            rows[:, i * heads[1] * d :][:, : heads[1] * d].unflatten(1, (-1, d)) for i in (0, 1)
        )
        turns = torch.rand((15, d // 2), device="cuda") * 6.3
        newest = Newest(k, v, torch.cat((turns.cos(), turns.sin()), 1))
        last = (case.lengths.long() - 1).clamp(min=0)
        blocks = case.block_tables.long().gather(1, (last // block)[:, None])[:, 0]
        slots = torch.where(case.lengths > 0, blocks * block + last % block, -1)
        keep = slots[slots >= 0]
        case.cache[keep // block, :, :, keep % block] = float("nan")
        before, q = case.cache.clone(), case.q.clone()
        turned = dataclasses.replace(case, q=case.q.clone(), cache=before.clone())
        every = torch.arange(15, device="cuda")
        rope_and_cache(turned.q, *newest, every, slots, turned.cache)
        outs = []
        for _ in range(5):
            case.cache.copy_(before)
            outs.append(decode(x, newest))
        y = dataclasses.replace(x, case=turned)
        judge.close(name, outs[0], attend_sinks(y, torch.float64), attend_sinks(y, dtype))
        judge.true(f"{name}: repeats", all(same_bits(out, outs[0]) for out in outs))
        judge.true(f"{name}: q", same_bits(case.q, q))
        got, want = case.cache, turned.cache
        judge.true(f"{name}: NaN", bool((got.isnan() == want.isnan()).all()))
        got, want = got.nan_to_num(0), want.nan_to_num(0)
        judge.true(f"{name}: cache", torch.allclose(got, want, torch.finfo(dtype).eps, 1e-5))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_chunks(dtype: torch.dtype) -> None:
    cases = CONFIGURATIONS[:: 5 if dtype == torch.bfloat16 else 11]
    compile_all(dtype, {d for _, d, _ in cases})
    judge = Judge(f"chunks that stream {short(dtype)}")
    for number, (heads, d, block) in enumerate(cases):
        for window, num_sinks in WINDOWS[number % 3 :: 3]:
            name = f"heads {heads} d {d} block {block} window {window} sinks {num_sinks}"
            x = make_sink_case(CHUNKS, CHUNK_LENGTHS, heads, d, block, dtype, window, num_sinks)
            judge.close(name, chunks(x), attend_sinks(x, torch.float64), attend_sinks(x, dtype))
            judge.repeats(name, lambda x=x: chunks(x))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_chunks_and_gaps_change_nothing(dtype: torch.dtype) -> None:
    """Cut anywhere, whatever of it is already forgotten, a row has the same bits."""
    judge = Judge(f"cuts and gaps {short(dtype)}")
    compile_all(dtype, {64, 80})
    length, block, window, num_sinks = 500, 16, 150, 5
    for d in (64, 80):
        x = make_sink_case([length], [length], (6, 2), d, block, dtype, 2000, num_sinks)
        case, places = x.case, torch.arange(length, device="cuda")

        def rows(begin: int, end: int, gap: int, case=case, x=x, places=places) -> torch.Tensor:
            """Without `gap` tokens behind the first block."""
            tables = torch.cat(
                (case.block_tables[:, :1], case.block_tables[:, 1 + gap // block :]), 1
            )
            starts, lengths = (
                case.lengths.new_tensor([0, end - begin]),
                case.lengths - length + end - gap,
            )
            own = (case.q[begin:end], x.angles[begin:end], places[begin:end].contiguous())
            where = (case.cache, tables.contiguous(), starts, lengths, case.scale, end - begin)
            return sink_attention(*own, *where, window, num_sinks)

        whole = rows(0, length, 0)
        for size in (1, 33, 64, 127, 300):
            for begin in range(0, length, size):
                end = min(length, begin + size)
                most = max(0, (begin + 1 - window + num_sinks) // block * block - block)
                for gap in {0, most // 2 // block * block, most}:
                    same = same_bits(rows(begin, end, gap), whole[begin:end])
                    judge.true(f"d {d} {begin}:{end} gap {gap}", same)
    judge.verdict()


@pytest.mark.parametrize("lengths", [[0] * 3, [1], [5000], [384] * 32, [300] * 600, [0, 999] * 50])
@pytest.mark.parametrize(("window", "num_sinks"), [(256, 4), (100, 70), (33, 0)])
def test_the_plan_covers_what_is_seen(lengths: list[int], window: int, num_sinks: int) -> None:
    """Workers one after the other walk the tiles of which a token is seen, in order."""
    cache = torch.empty((1, 2, 2, 16, 64), dtype=torch.float16, device="cuda")
    on_gpu = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    plan = plan_decode(on_gpu, cache, 24, window, num_sinks=num_sinks).tolist()
    num_ctas, shape = decoding._device(0, torch.float16, 64)
    starts_at = -(-num_ctas // 4) * 4 + 8 * num_ctas
    tiles = []
    for row, length in enumerate(lengths):
        first = max(0, length - window + num_sinks)
        kept = [i for i in range(-(-length // 32)) if i * 32 < num_sinks or i * 32 + 32 > first]
        tiles += [(row, head, tile) for head in range(4) for tile in kept]
    done = 0
    for worker in range(num_ctas * shape.warps):
        _, head, tile, count, row, length = plan[starts_at + 8 * worker :][:6]
        if count:
            assert (row, head, tile) == tiles[done]
            assert length == lengths[row]
        done += count
    assert done == len(tiles)
