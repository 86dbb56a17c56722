"""Prefill attention in every legal configuration: against fp64, poisoned, repeated bitwise."""

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
from slipstream.kernels.attention.prefill import prefill_attention

pytestmark = pytest.mark.gpu

CHUNKS = [1, 5, 0, 64, 65, 100, 17, 128, 1, 33, 3]
CHUNK_LENGTHS = [1, 5, 50, 64, 65, 300, 2049, 1000, 777, 33, 259]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_prefill_attention(dtype: torch.dtype) -> None:
    judge = Judge(f"prefill_attention {short(dtype)}")
    for heads, d, block in configurations()[:: 1 if dtype == torch.bfloat16 else 2]:
        name = f"heads {heads} d {d} block {block}"
        case = make_case(CHUNKS, CHUNK_LENGTHS, heads, d, block, dtype)

        def run(case=case) -> torch.Tensor:
            poison(case.q.shape, dtype=dtype)
            return prefill_attention(
                case.q,
                case.cache,
                case.block_tables,
                case.query_starts,
                case.lengths,
                case.scale,
                max(CHUNKS),
            )

        judge.close(name, run(), attend(case, torch.float64), attend(case, dtype))
        judge.repeats(name, run)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_windows(dtype: torch.dtype) -> None:
    """No entry in front of the first query's window is read; chunk cuts change no bit."""
    judge = Judge(f"windows {short(dtype)}")
    for heads, d, block, window in with_windows((1, 33, 100, 1000), 2):
        case = make_case(CHUNKS, CHUNK_LENGTHS, heads, d, block, dtype, window=window)
        where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
        out = prefill_attention(case.q, *where, max(CHUNKS), window=window)
        name = f"heads {heads} d {d} block {block} window {window}"
        judge.close(name, out, attend(case, torch.float64), attend(case, dtype))
    case = make_case([300], [700], (6, 2), 128, 16, dtype, window=200)
    where = (case.cache, case.block_tables)

    def rows(begin: int, end: int) -> torch.Tensor:
        starts, lengths = case.lengths.new_tensor([0, end - begin]), case.lengths - 300 + end
        return prefill_attention(
            case.q[begin:end], *where, starts, lengths, case.scale, end - begin, window=200
        )

    whole = rows(0, 300)
    for begin, end in ((0, 50), (50, 300)):
        judge.true(f"rows {begin}:{end}", same_bits(rows(begin, end), whole[begin:end]))
    judge.verdict()


def rows_of(case: Case, begin: int, end: int, max_queries: int = 0) -> torch.Tensor:
    """Rows [begin, end) of a case of one sequence, computed as a chunk of their own."""
    return prefill_attention(
        case.q[begin:end],
        case.cache,
        case.block_tables,
        torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
        torch.tensor([end], dtype=torch.int32, device="cuda"),
        case.scale,
        max_queries or end - begin,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_chunks_change_nothing(dtype: torch.dtype) -> None:
    """A prompt cut anywhere gives a row the same bits: tiles of keys always start at token 0."""
    judge = Judge(f"chunk cuts {short(dtype)}")
    length = 700
    for heads, d in (
        ((6, 2), 64),
        ((6, 2), 80),
        ((6, 2), 128),
        ((4, 4), 128),
        ((7, 1), 128),
        ((6, 2), 256),
    ):
        case = make_case([length], [length], heads, d, 16, dtype)
        want = rows_of(case, 0, length)
        for size in (1, 31, 32, 33, 63, 65, 127, 128, 129, 300, 699):
            for begin in range(0, length, max(size, 7)):  # places in tiles of every kind
                end = min(length, begin + size)
                got = rows_of(case, begin, end, max_queries=begin % 3 * 500)
                same = same_bits(got, want[begin:end])
                judge.true(f"heads {heads} d {d} rows {begin}:{end}", same)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_long_prefill(dtype: torch.dtype) -> None:
    """More work than multiprocessors: every one of them takes several tiles of queries."""
    judge = Judge(f"long prefill {short(dtype)}")
    for d in (64, 128, 256):
        case = make_case([2100, 0, 1, 515], [2100, 7, 900, 2000], (16, 4), d, 32, dtype)

        def run(case=case) -> torch.Tensor:
            poison(case.q.shape, dtype=dtype)
            arguments = (case.q, case.cache, case.block_tables, case.query_starts, case.lengths)
            return prefill_attention(*arguments, case.scale, 2100)

        judge.close(f"d {d}", run(), attend(case, torch.float64), attend(case, dtype))
        judge.repeats(f"d {d}", run)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows_of_no_chunk_stay(dtype: torch.dtype) -> None:
    """The result goes into a part of a tensor; a captured graph reads its inputs at replay."""
    judge = Judge(f"prefill into a part, in a graph {short(dtype)}")
    case = make_case([300, 40, 9, 20], [300, 400, 9, 129], (8, 2), 128, 32, dtype)
    whole = torch.empty((400, 8, 128), dtype=dtype, device="cuda")
    part = whole[10:379]
    arguments = (case.q, case.cache, case.block_tables, case.query_starts, case.lengths)
    prefill_attention(*arguments, case.scale, 300, part)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(*arguments, case.scale, 300, part)
    mixes = (
        ([300, 40, 9, 20], [300, 400, 9, 129]),
        ([1, 0, 2, 0], [300, 0, 9, 0]),
        ([128, 33, 0, 0], [290, 33, 0, 0]),
        ([0, 0, 0, 1], [0, 0, 0, 128]),
    )
    for chunks, lengths in mixes:
        case.query_starts.copy_(torch.tensor([0, *chunks]).cumsum(0))
        case.lengths.copy_(torch.tensor(lengths))
        case.chunks = chunks
        whole.fill_(7)
        graph.replay()
        used = sum(chunks)
        exact, naive = (attend(case, t)[:used] for t in (torch.float64, dtype))
        judge.close(f"{chunks}", part[:used], exact, naive)
        others = torch.cat((whole[:10], whole[10 + used :]))
        judge.true(f"{chunks}: other rows", bool((others == 7).all()))
    judge.verdict()
