"""Prefill attention of few, small chunks behind many tokens, which several CTAs share."""

import pytest
import torch
from fixtures.kernels.attention_cases import Case, attend, make_case
from fixtures.kernels.checking import Judge, poison, same_bits, short
from fixtures.kernels.prefill_plan import MOST_PARTS, Mix, plan
from slipstream.kernels.attention.prefill import (
    PrefillCall,
    launch_wgmma,
    parts_size,
    prefill_attention,
)
from slipstream.kernels.runtime import jit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not jit.is_hopper(torch.device("cuda", 0)),
        reason="no NVIDIA GPU of sm_90",
    ),
]

DTYPES = (torch.float16, torch.bfloat16)
HEADS = [(8, 2), (7, 1), (3, 3), (16, 4)]
MIXES: list[Mix] = [
    [(64, 40000)],
    [(1, 40000)],
    [(16, 2064), (0, 100), (64, 8000), (1, 9000), (0, 0)],
    [(5, 5), (128, 33000), (200, 900), (65, 4161)],
    [(33, 1025), (17, 32785), (1, 1)],
]


def case_of(mix: Mix, heads: tuple[int, int], d: int, block: int, dtype: torch.dtype) -> Case:
    return make_case([q for q, _ in mix], [length for _, length in mix], heads, d, block, dtype)


def run(case: Case, out: torch.Tensor | None = None, splits: bool = True) -> torch.Tensor:
    where = (case.cache, case.block_tables, case.query_starts, case.lengths)
    return prefill_attention(case.q, *where, case.scale, max(case.chunks), out, splits=splits)


def num_parts(mix: Mix, heads: tuple[int, int]) -> int:
    """Return the number of parts of items that are cut."""
    return sum(part.parts > 1 for part in plan(mix, heads, jit.num_multiprocessors(0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_parts(dtype: torch.dtype) -> None:
    """Against fp64, flat scores and sharp ones, whose parts weigh very differently; repeated."""
    judge = Judge(f"prefill in parts {short(dtype)}")
    cases = [(m, HEADS[m % 4], (64, 128)[m // 2 % 2], (16, 32, 256)[m % 3]) for m in range(10)]
    for number, heads, d, block in cases:
        mix = MIXES[number % len(MIXES)]
        case = case_of(mix, heads, d, block, dtype)
        name = f"{mix} heads {heads} d {d} block {block}"
        judge.true(f"{name}: in parts", num_parts(mix, heads) > 1)
        for factor in (1, 6):
            case.q.mul_(factor)

            def once(case: Case = case) -> torch.Tensor:
                poison(case.q.shape, (parts_size(case.q.shape[2]) * 2,), dtype=dtype)
                return run(case)

            exact, naive = attend(case, torch.float64), attend(case, dtype)
            judge.close(f"{name} x {factor}", once(), exact, naive)
            judge.repeats(f"{name} x {factor}", once)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_places(dtype: torch.dtype) -> None:
    """A launch writes the sums of its parts where the plan says, and nothing around them."""
    judge = Judge(f"places of parts {short(dtype)}")
    for mix in MIXES:
        for heads, d in (((8, 2), 128), ((7, 1), 64)):
            case = case_of(mix, heads, d, 32, dtype)
            size, margin = parts_size(d), 1 << 16
            memory = torch.full((size + 2 * margin,), -7.0, device="cuda")
            parts = memory[margin:-margin]
            out = torch.zeros_like(case.q)
            where = (case.cache, case.block_tables, case.query_starts, case.lengths)
            call = PrefillCall(case.q, *where, case.scale, max(case.chunks))
            launch_wgmma(call, out, parts)
            name = f"{mix} heads {heads} d {d}"
            judge.true(f"{name}: as always", same_bits(out, run(case)))
            margins = torch.cat((memory[:margin], memory[-margin:]))
            judge.true(f"{name}: margins", bool((margins == -7).all()))
            written = (parts.view(MOST_PARTS, -1) != -7).any(1)
            count = num_parts(mix, heads)
            is_right = bool(written[:count].all()) and not bool(written[count:].any())
            judge.true(f"{name}: {int(written.sum())} places, not {count}", is_right)
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_whole_items_keep_their_bits(dtype: torch.dtype) -> None:
    """Where nothing is cut, and without `splits`, where chunks are cut changes nothing."""
    judge = Judge(f"prefill not in parts {short(dtype)}")
    for mix in ([(2048, 2048)], [(512, 4608)] * 4, [(700, 700), (5, 600)]):
        case = case_of(mix, (32, 8), 128, 32, dtype)
        assert num_parts(mix, (32, 8)) == 0
        judge.true(f"{mix}", same_bits(run(case), run(case, splits=False)))
    case = case_of([(200, 5000)], (8, 2), 128, 16, dtype)
    whole = run(case, splits=False)
    for begin, end in ((0, 1), (1, 33), (33, 97), (97, 200)):
        got = prefill_attention(
            case.q[begin:end],
            case.cache,
            case.block_tables,
            torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            torch.tensor([4800 + end], dtype=torch.int32, device="cuda"),
            case.scale,
            end - begin,
        )
        judge.true(f"rows {begin}:{end}", same_bits(got, whole[begin:end]))
    judge.verdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_replays(dtype: torch.dtype) -> None:
    """One graph, whose lengths change: in parts and whole, one replay after the other."""
    judge = Judge(f"prefill in parts, in a graph {short(dtype)}")
    case = case_of([(64, 20000), (64, 9000), (64, 300)], (8, 2), 128, 32, dtype)
    out = torch.empty_like(case.q)
    run(case, out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # the same memory for parts, by turns
            run(case, out)
    mixes: list[Mix] = [
        [(64, 20000), (64, 9000), (64, 300)],
        [(1, 20000), (0, 0), (17, 290)],
        [(64, 64), (30, 700), (0, 0)],
        [(40, 15000), (64, 9000), (1, 1)],
    ]
    for mix in mixes * 2:
        case.chunks = [queries for queries, _ in mix]
        case.query_starts.copy_(torch.tensor([0, *case.chunks]).cumsum(0))
        case.lengths.copy_(torch.tensor([length for _, length in mix]))
        used = sum(case.chunks)
        bits = []
        for _ in range(20):
            out.fill_(7)
            graph.replay()
            bits.append(out.clone())
        judge.true(f"{mix}: repeated", all(same_bits(bits[0], one) for one in bits))
        judge.true(f"{mix}: as without", same_bits(bits[0][:used], run(case)[:used]))
        judge.true(f"{mix}: other rows", bool((bits[0][used:] == 7).all()))
        exact, naive = (attend(case, t)[:used] for t in (torch.float64, dtype))
        judge.close(f"{mix}", bits[0][:used], exact, naive)
    judge.verdict()
