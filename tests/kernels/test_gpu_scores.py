"""Capped scores, ALiBi and sinks in the softmax on a GPU: against fp64, repeated bitwise."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from fixtures.kernels.attention_cases import (
    Case,
    attend,
    in_format,
    kinds_of_scores,
    make_case,
    with_windows,
)
from fixtures.kernels.checking import DTYPES, Judge, poison, same_bits, short
from fixtures.kernels.compiling import compile_all, those_with
from fixtures.kernels.newest import HALVES, newest_of
from fixtures.kernels.prefix_cases import shared_case
from slipstream.kernels.attention import decode as decoding
from slipstream.kernels.attention import prefill as prefilling
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.attention.rules import CAPPED, SINKING, SLOPED
from slipstream.kernels.attention.scores import macros as macros_of
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.elementwise.rope import rope_and_cache
from slipstream.kernels.runtime import jit

pytestmark = pytest.mark.gpu
LENGTHS = [0, 1, 2, 7, 31, 33, 0, 77, 256, 257, 1000, 0, 64, 1100, 5000]
CHUNKS = [1, 5, 0, 64, 65, 100, 17, 128, 1, 33, 3]
CHUNK_LENGTHS = [1, 5, 50, 64, 65, 300, 2049, 1000, 777, 33, 259]
WINDOWS = (0, 33, 256)
KINDS = (CAPPED, SLOPED, SINKING)
by_kind = pytest.mark.parametrize("kind", KINDS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=short)


def compile_of(dtype: torch.dtype, cached: torch.dtype | None, kind: str) -> None:
    """What steps without a rotation need."""
    macros = {"FORMAT": None, "SINKS": None, "ROTATES": 0, "ELEMENT": jit.type_name(dtype)}
    macros |= kv_format.macros(cached or dtype) | macros_of(kind)
    compile_all(those_with((*decoding.variants(), *prefilling.variants()), **macros))


def by_plan(case: Case, scores: str) -> torch.Tensor:
    heads, where = case.q.shape[1], (case.block_tables, case.lengths)
    tables = None if case.window else case.block_tables
    plan = plan_decode(case.lengths, case.cache, heads, case.window, tables, scores=scores)
    how = {"window": case.window, "changed": case.changed}
    return decode_attention(case.q, case.cache, *where, plan, case.scale, **how)


def by_split(case: Case) -> torch.Tensor:
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    where = (case.cache, case.block_tables, case.lengths, none, case.scale)
    return decode_attention(case.q, *where, window=case.window, changed=case.changed)


def as_chunks(case: Case) -> torch.Tensor:
    where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
    how = {"window": case.window, "changed": case.changed}
    return prefill_attention(case.q, *where, max(case.chunks), **how)


def check(judge: Judge, name: str, run: Callable[[], torch.Tensor], left: Case) -> None:
    poison(left.q.shape, dtype=left.q.dtype)
    out = run()
    judge.close(name, out, attend(left, torch.float64), attend(left, left.q.dtype))
    judge.repeats(name, run)


def cases(step: int, kind: str, smallest: int = 8) -> Iterator[tuple[str, tuple, int, object]]:
    for heads, d, block, window in with_windows(WINDOWS, step, smallest):
        name = f"{kind} heads {heads} d {d} block {block} window {window}"
        yield name, (heads, d, block), window, kinds_of_scores(heads[0])[kind]


@by_kind
@by_dtype
def test_decodes_and_chunks(dtype: torch.dtype, kind: str) -> None:
    compile_of(dtype, None, kind)
    judge = Judge(f"{kind} {short(dtype)}")
    for name, shape, window, changed in cases(3, kind):
        single = make_case([1] * len(LENGTHS), LENGTHS, *shape, dtype, window=window)
        single = dataclasses.replace(single, changed=changed)
        if dtype != torch.float32:
            check(judge, f"{name} by plan", lambda x=single: by_plan(x, kind), single)
        check(judge, f"{name} by split", lambda x=single: by_split(x), single)
        judge.true(f"{name}: length 0", not by_split(single)[single.lengths == 0].any())
        chunks = make_case(CHUNKS, CHUNK_LENGTHS, *shape, dtype, window=window)
        chunks = dataclasses.replace(chunks, changed=changed)
        check(judge, f"{name} as chunks", lambda x=chunks: as_chunks(x), chunks)
    judge.verdict()


@by_kind
@pytest.mark.parametrize("format_name", FORMATS)
def test_over_a_cache_in_fewer_bits(format_name: str, kind: str) -> None:
    dtype, cached = torch.bfloat16, FORMATS[format_name]
    compile_of(dtype, cached, kind)
    judge = Judge(f"{kind} over {format_name}")
    for name, shape, window, changed in cases(2, kind, kv_format.MIN_BLOCK_SIZE):
        for chunks, lengths in (([1] * 15, LENGTHS), (CHUNKS, CHUNK_LENGTHS)):
            plain = make_case(chunks, lengths, *shape, dtype, window=window)
            whole = dataclasses.replace(plain, changed=changed)
            whole.cache.nan_to_num_(0.0)
            case, left = in_format(whole, cached)
            left = dataclasses.replace(left, cache=left.cache.to(dtype))
            run = by_split if max(chunks) == 1 else as_chunks
            check(judge, f"{name} {len(chunks)}", lambda x=case, f=run: f(x), left)
            if max(chunks) == 1:
                check(judge, f"{name} by plan", lambda x=case: by_plan(x, kind), left)
    judge.verdict()


@by_kind
@by_dtype
def test_cuts_of_chunks_change_no_bit(dtype: torch.dtype, kind: str) -> None:
    judge = Judge(f"cuts, {kind} {short(dtype)}")
    case = make_case([500], [700], (6, 2), 64, 16, dtype)
    case = dataclasses.replace(case, changed=kinds_of_scores(6)[kind])

    def rows(begin: int, end: int) -> torch.Tensor:
        starts, lengths = case.lengths.new_tensor([0, end - begin]), case.lengths - 500 + end
        where = (case.cache, case.block_tables, starts, lengths, case.scale, end - begin)
        return prefill_attention(case.q[begin:end], *where, changed=case.changed)

    whole = rows(0, 500)
    for size in (1, 33, 64, 127):
        for begin in range(0, 500, max(size, 7)):  # places in tiles of every kind
            end = min(500, begin + size)
            judge.true(f"{begin}:{end}", same_bits(rows(begin, end), whole[begin:end]))
    judge.verdict()


@by_kind
@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_rotation_and_what_is_shared(dtype: torch.dtype, kind: str) -> None:
    """The newest tokens come as projected; sinks count once, shared tokens or not."""
    judge = Judge(f"shared, {kind} {short(dtype)}")
    prefixes = [([("a", 1024)], 64 + i % 7) for i in range(24)] + [([], 300)]
    for heads, d in (((8, 2), 128), ((6, 2), 64)):
        case = shared_case(prefixes, heads, d, 32, dtype, "cuda")
        case = dataclasses.replace(case, changed=kinds_of_scores(heads[0])[kind])
        newest, positions, slots = newest_of(case, heads[1])
        before = case.cache.clone()
        turned = dataclasses.replace(case, q=case.q.clone(), cache=before.clone())
        rope_and_cache(turned.q, *newest, positions, slots, turned.cache)
        where = (case.block_tables, case.lengths)

        def run(case=case, newest=newest, before=before, where=where, heads=heads) -> torch.Tensor:
            case.cache.copy_(before)
            tables = case.block_tables
            plan = plan_decode(case.lengths, case.cache, heads[0], 0, tables, scores=kind)
            how = {"newest": newest, "changed": case.changed}
            return decode_attention(case.q, case.cache, *where, plan, case.scale, **how)

        check(judge, f"heads {heads} d {d}", run, turned)
    judge.verdict()
