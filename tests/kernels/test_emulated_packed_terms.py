"""GEMMs with packed weights and terms of adapters: their CUDA source, emulated, against torch."""

from typing import NamedTuple

import pytest
import torch
from fixtures.kernels.emulation import emulate, on_ctas
from fixtures.kernels.lora import Adapted, Shape
from fixtures.kernels.packed_cases import BLOCKS, FLOATS, FORMS, SHARED, Form, packed_pair
from fixtures.tiers import quick_of
from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.gemm.op import COUNTS, WHOLE_ROWS, Around, TermTable, gemm, scratch_of
from slipstream.kernels.gemm.sm90 import packed_pipe, packed_stream
from slipstream.kernels.runtime import jit
from torch import Tensor

BF16 = torch.bfloat16


class Case(NamedTuple):
    inputs: int
    sizes: tuple[int, ...]  # outputs of parts
    ranks: tuple[tuple[int, ...], ...]  # of adapters
    numbers: list[int]  # of rows: their adapters, from 1
    stage: str = ""
    form: Form = FORMS[0]
    is_pipe: bool = False  # the kernel is `packed_pipe`, else `packed_stream`


CASES = {
    # Outputs that end within a tile, of which a part does, too; inputs of two parts of a row of A.
    "stacked": Case(1160, (34, 10, 22), ((16, 0, 3), (40, 8, 0)), [1]),
    "rows without an adapter": Case(520, (40, 24), ((16, 0), (3, 5)), [0, 2, 0], "", FORMS[1]),
    "gated": Case(2088, (32, 32), ((16, 16), (1, 0), (0, 9)), [1, 0], "silu"),
    # More outputs than threads, several tiles at a time, twice.
    "gated, eight rows of three": Case(
        264, (48, 48), ((16, 5), (1, 0), (0, 40)), [3, 1, 2, 1, 1, 0, 3, 3], "silu"
    ),
    # More columns of t than shared memory has at once.
    "many ranks": Case(256, (12, 20), ((100, 120), (16, 0)), [2, 1], "residual"),
    "many inputs": Case(17_480, (16,), ((16,), (2,)), [2], "residual"),
    "8 bits, ordered": Case(520, (48,), ((16,), (30,)), [2, 1], "residual", FORMS[8]),
    "minimums": Case(520, (48,), ((16,), (30,)), [2, 1], "residual", SHARED),
    "4 bits, factors": Case(256, (48,), ((16,), (30,)), [2, 1], "residual", FORMS[5]),
    "floats": Case(256, (48,), ((16,), (30,)), [2, 1], "residual", FLOATS[1]),
    "e4m3": Case(264, (48,), ((16,), (30,)), [2, 1], "residual", BLOCKS),
    "none has a term": Case(512, (20, 12), ((16, 0), (0, 0)), [2, 0], "residual"),
    "pipe, stacked": Case(264, (34, 100, 22), ((16, 0, 3), (40, 8, 0)), [1, 0, 2], is_pipe=True),
    "pipe, gated": Case(
        1160, (112, 112), ((16, 16), (1, 0), (0, 9)), [1, 0, 3], "silu", is_pipe=True
    ),
    "pipe, floats": Case(256, (48,), ((16,), (30,)), [2, 1], "residual", FLOATS[1], True),
    "pipe, e4m3": Case(264, (48,), ((16,), (30,)), [2, 1], "residual", BLOCKS, True),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"stacked"}))
def test_terms_are_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, as what a launch leaves must serve the next; rows without a term keep their bits."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 1)  # CTAs run one after another
    case = CASES[name]
    made = Adapted(Shape(case.inputs, case.sizes, case.ranks), BF16, "cpu", by_launchers=True)
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(BF16)

    rows, outputs = len(case.numbers), sum(case.sizes)
    gate = case.stage if case.stage == "silu" else ""
    matrix = packed_pair(case.form, outputs, case.inputs)[0]
    x, bias = drawn(rows, case.inputs), drawn(outputs)
    residual = drawn(rows, outputs) if case.stage == "residual" else None
    scratch = scratch_of(made.width, torch.device("cpu"))
    table = made.table(case.numbers)
    terms = TermTable(table.groups, table.rows, 1, scratch, case.sizes)
    plain = Around(columns=matrix.scales, bias=bias, groups=matrix.groups)
    wanted = made.by_torch(gemm.oracle(x.float(), matrix.values, plain), x, case.numbers)
    wanted = activate(gate, wanted) if gate else wanted
    wanted = wanted if residual is None else wanted + residual.float()

    def around() -> Around:
        own = None if residual is None else residual.clone()
        return plain._replace(gate=gate, residual=own)

    plainly = packed_pipe.packed_pipe if case.is_pipe else packed_stream.packed_stream
    adapted = packed_pipe.adapted if case.is_pipe else packed_stream.adapted
    has_no_term = [number == 0 or not any(case.ranks[number - 1]) for number in case.numbers]
    alone = plainly(x, matrix.values, around()) if any(has_no_term) else None
    for _ in range(2):
        found = adapted(x, matrix.values, around(), terms)
        assert ((found.float() - wanted).abs() / (1 + wanted.abs())).max() < 2**-6
        if alone is not None:
            assert torch.equal(found[has_no_term], alone[has_no_term])
        assert not scratch[:COUNTS].any()
        assert not scratch[COUNTS + WHOLE_ROWS * made.width :].any()


@pytest.mark.rest
@pytest.mark.parametrize("is_pipe", [False, True])
def test_ctas_make_t_together(is_pipe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for what the others make, and the last one leaves t as it was."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 3)
    sizes = (384, 100, 60) if is_pipe else (64, 20, 60)
    made = Adapted(Shape(2088, sizes, ((16, 0, 3), (40, 8, 0))), BF16, "cpu", by_launchers=True)
    matrix, numbers = packed_pair(FORMS[0], sum(sizes), 2088)[0], [1, 0, 2]
    x = torch.randn(3, 2088, generator=torch.Generator().manual_seed(0)).to(BF16)
    scratch, table = scratch_of(made.width, torch.device("cpu")), made.table(numbers)
    terms = TermTable(table.groups, table.rows, 1, scratch, sizes)
    plain = Around(columns=matrix.scales, groups=matrix.groups)
    wanted = made.by_torch(gemm.oracle(x.float(), matrix.values, plain), x, numbers)
    adapted = packed_pipe.adapted if is_pipe else packed_stream.adapted
    for _ in range(3):
        y = torch.zeros(3, sum(sizes), dtype=BF16)
        around = plain._replace(residual=y)
        on_ctas(3, lambda around=around: adapted(x, matrix.values, around, terms))  # type: ignore[misc]
        assert ((y.float() - wanted).abs() / (1 + wanted.abs())).max() < 2**-6
        assert not scratch.any()
