"""Experts in 4 and 8 bits on a GPU: sums by fp64, repeated bitwise, rows alone, in a graph."""

import math

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, same_bits, short
from fixtures.kernels.expert_cases import EXPERT_FORMS, Case, Sizes, make_case
from fixtures.kernels.packed_cases import BLOCKS, FLOATS, FORMS, Form
from slipstream.kernels.experts import packed
from slipstream.kernels.experts.spec import Gate
from torch import Tensor

pytestmark = pytest.mark.gpu
SHAPES = [
    (Sizes(5, 3, 80, 48), (1, 7, 33)),
    (Sizes(3, 1, 1040, 272), (1, 20, 129)),
    (Sizes(16, 2, 2048, 656), (1, 5, 64, 300)),
    (Sizes(32, 4, 1440, 1440), (1, 32, 200)),
]


def tiles_of(case: Case) -> tuple[int, ...]:
    """Rows of tiles that both matrices have."""
    assert case.down.groups is not None
    return packed.tile_rows(case.down.groups.packing)


def run(case: Case, rows: int, residual: Tensor) -> Tensor:
    """With NaN in the memory that the results get."""
    pairs = len(case.x) * case.sizes.top_k
    poison((pairs, case.sizes.inner), (pairs, case.sizes.hidden), dtype=case.x.dtype)
    return case.run(rows, residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("form", EXPERT_FORMS, ids=str)
def test_sums_of_experts(form: Form, dtype: torch.dtype) -> None:
    judge = Judge(f"experts {form} {short(dtype)}")
    for sizes, all_rows in SHAPES if dtype == torch.bfloat16 else SHAPES[:2]:
        for n in all_rows:
            gate, bias = (Gate.CLAMPED, True) if sizes.top_k == 4 else (Gate.SILU, n % 2 == 0)
            case = make_case(n, sizes, dtype, False, bias, gate, "cuda", n, form)
            if dtype == torch.float16 and form is FLOATS[1]:
                case.x *= 2.0**-12  # its weights go up to 768, and sums of them above what fp16 has
            residual = torch.randn_like(case.x)
            routed = case.routed(8)
            exact = case.expected(routed, residual, torch.float64)
            naive = case.expected(routed, residual, dtype)
            for rows in tiles_of(case):
                name = f"{n} rows of {sizes}, tiles of {rows}"
                judge.close(name, run(case, rows, residual), exact, naive)
                judge.repeats(name, lambda: case.run(rows, residual))  # noqa: B023
    judge.verdict()


@pytest.mark.parametrize("form", [FORMS[2], BLOCKS, FLOATS[0]], ids=str)
def test_rows_do_not_depend_on_their_neighbours(form: Form) -> None:
    """Bit for bit, in tiles of all sizes but 8, and at every place in one."""
    judge = Judge("rows alone")
    sizes, n = Sizes(8, 2, 1056, 512), 300
    case = make_case(n, sizes, torch.bfloat16, device="cuda", form=form)
    residual = torch.randn_like(case.x)
    whole = case.run(tiles_of(case)[-1], residual)
    for rows in tiles_of(case)[1:]:
        judge.true(f"tiles of {rows}", same_bits(case.run(rows, residual), whole))
        for kept in (torch.arange(1), torch.arange(n).flip(0)[:77], torch.arange(3, n, 7)):
            some = make_case(n, sizes, torch.bfloat16, device="cuda", form=form)
            some.x, some.logits = some.x[kept.cuda()], some.logits[kept.cuda()]
            found = some.run(rows, residual[kept.cuda()])
            judge.true(f"{len(kept)} rows by {rows}", same_bits(found, whole[kept.cuda()]))
    judge.verdict()


@pytest.mark.parametrize("form", [FORMS[0], FLOATS[1]], ids=str)
def test_no_number_stays_in_its_row(form: Form) -> None:
    for rows in (8, 16, 32):
        case = make_case(9, Sizes(4, 2, 208, 48), torch.bfloat16, device="cuda", form=form)
        residual = torch.randn_like(case.x)
        whole = case.run(rows, residual)
        case.x[2, 7], case.x[5, 200] = math.nan, math.inf
        found = run(case, rows, residual)
        kept = torch.tensor([0, 1, 3, 4, 6, 7, 8], device="cuda")
        assert same_bits(found[kept], whole[kept])
        assert not found[2].isfinite().any()


@pytest.mark.parametrize("form", [FORMS[0], FLOATS[1]], ids=str)
def test_in_a_graph_the_choice_is_made_anew(form: Form) -> None:
    for n, rows in ((1, 8), (40, 16), (128, 32)):
        sizes = Sizes(64, 8, 1024, 256)
        case = make_case(n, sizes, torch.bfloat16, device="cuda", form=form)
        residual = torch.zeros_like(case.x)
        case.run(rows, residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run(rows, residual)
        for seed in range(5):
            other = make_case(n, sizes, torch.bfloat16, device="cuda", seed=seed)
            case.x.copy_(other.x)
            case.logits.copy_(other.logits)
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(out, case.run(rows, residual)), f"{n} rows, seed {seed}"
