"""GEMMs of experts with packed weights, by their source run on a CPU, against their oracles."""

import math
from collections.abc import Hashable

import pytest
import torch
from fixtures.kernels.checking import same_bits
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import EXPERT_FORMS, Case, Sizes, make_case
from fixtures.kernels.packed_cases import FLOATS, FORMS, SHARED, WIDE, Form
from fixtures.kernels.pairs import covering
from fixtures.tiers import quick_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream.kernels.experts import packed
from slipstream.kernels.experts.grouped import down, gate_up
from slipstream.kernels.experts.spec import Gate
from torch import Tensor

FP16_MAX = torch.finfo(torch.float16).max
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of two that lie beside a boundary
EIGHTS = st.integers(1, 40).map(lambda count: 8 * count)
TILES = st.integers(1, 6).map(lambda count: 16 * count)
DRAWN = settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def sizes_of(form: Form) -> tuple[int, ...]:
    """Rows of tiles of a form."""
    case = make_case(1, Sizes(1, 1, 16, 16), torch.bfloat16, form=form)
    assert case.down.groups is not None
    return packed.tile_rows(case.down.groups.packing)


CASES = [(form, rows) for form in EXPERT_FORMS for rows in sizes_of(form)]


def products(case: Case, rows: int) -> tuple[Tensor, Tensor]:
    """Gated values of places and outputs of pairs, by the kernel."""
    routed = case.routed(rows)
    inner = gate_up.launcher(case.x, case.gate_up.values, case.gate_up, routed, case.gate)
    return inner, down.launcher(inner, case.down.values, case.down, routed)


def check(case: Case, rows: int) -> None:
    """Compare both with the oracles' in fp32, within a rounding."""
    routed = case.routed(rows)
    inner, found = products(case, rows)
    expected = gate_up.oracle(case.x.float(), case.gate_up.values, case.gate_up, routed, case.gate)
    assert_near(inner, expected)
    if not inner.isfinite().all():  # of infinity less infinity nothing is left to compare
        return
    assert_near(found, down.oracle(inner.float(), case.down.values, case.down, routed))


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Compare within a rounding, though terms are larger than sums and some too large for fp16."""
    expected = expected.to(found.dtype).float().where(expected.abs() > FP16_MAX, expected)
    largest = expected.abs().where(expected.isfinite(), 0.0).max()
    atol = max(1e-4, 1e-6 * float(largest))
    torch.testing.assert_close(found.float(), expected, rtol=ROUNDING[found.dtype], atol=atol)


def parts_of(tile: tuple[Form, int]) -> set[Hashable]:
    """A form, and rows of tiles with the kind of weights, and with that of records."""
    form, rows = tile
    return {form, (rows, form.kind), (rows, bool(form.record))}


def marked(tile: tuple[Form, int]) -> object:
    """Mark a tile by its tier: one is quick, those of rest have all parts, others are slow."""
    marks = pytest.mark.rest if tile in ALL_PARTS else pytest.mark.slow
    name = f"{tile[0]}, {tile[1]}"
    return pytest.param(tile, marks=() if tile == (FORMS[2], 8) else marks, id=name)


ALL_PARTS = covering(CASES, parts_of)


@pytest.mark.parametrize("tile", list(map(marked, CASES)))
def test_tiles(monkeypatch: pytest.MonkeyPatch, tile: tuple[Form, int]) -> None:
    """Full, short and no tiles; an odd number of tiles of weights; a width that ends in a block."""
    emulate(monkeypatch)
    form, rows = tile
    gate = Gate.CLAMPED if rows == 16 else Gate.SILU
    case = make_case(rows, Sizes(3, 2, 688, 80), torch.bfloat16, False, rows != 8, gate, form=form)
    check(case, rows)


@pytest.mark.rest
@DRAWN
@given(st.data(), st.integers(1, 70), st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("form", [FORMS[0], FORMS[7], FLOATS[0], SHARED, WIDE], ids=str)
def test_drawn_layers(
    monkeypatch: pytest.MonkeyPatch, form: Form, data: st.DataObject, num_rows: int, seed: int
) -> None:
    emulate(monkeypatch)
    experts = data.draw(st.integers(1, 5))
    top_k = data.draw(st.integers(1, experts))
    sizes = Sizes(experts, top_k, data.draw(TILES), data.draw(TILES))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    gate, bias = data.draw(st.sampled_from(list(Gate))), data.draw(st.booleans())
    rows = data.draw(st.sampled_from(sizes_of(form)))
    check(make_case(num_rows, sizes, dtype, False, bias, gate, seed=seed, form=form), rows)


@pytest.mark.rest
@pytest.mark.parametrize("form", [FORMS[1], FLOATS[0], WIDE], ids=str)
def test_a_row_has_the_same_bits_in_tiles_of_all_sizes(
    monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """But those of 8, which deterministic mode does not take; at every place in one, too."""
    emulate(monkeypatch)
    case = make_case(40, Sizes(2, 2, 592, 96), torch.bfloat16, bias=True, form=form)
    sizes = sizes_of(form)[1:]
    _, whole = products(case, sizes[-1])
    for rows in sizes:
        assert same_bits(products(case, rows)[1], whole)
        for kept in (torch.arange(1), torch.arange(40).flip(0)[:21]):
            some = make_case(40, case.sizes, torch.bfloat16, bias=True, form=form)
            some.x, some.logits = some.x[kept], some.logits[kept]
            found = products(some, rows)[1].view(len(kept), 2, -1)
            assert same_bits(found, whole.view(40, 2, -1)[kept]), (rows, len(kept))


@pytest.mark.parametrize("rows", quick_of(packed.MOST_E2M1_PAIRS, [16]))
def test_no_number_stays_in_its_row(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """And what a row has behind its width is not read."""
    emulate(monkeypatch)
    case = make_case(5, Sizes(2, 2, 208, 48), torch.bfloat16, form=FLOATS[1])
    _, whole = products(case, rows)
    wide = torch.full((5, 216), math.nan, dtype=torch.bfloat16)
    wide[:, :208] = case.x
    wide[2, 7], wide[3, 200] = math.nan, math.inf
    case.x = wide[:, :208]
    _, found = products(case, rows)
    pairs, expected = found.view(5, 2, -1), whole.view(5, 2, -1)
    assert not pairs[2:4].isfinite().any()
    kept = torch.tensor([0, 1, 4])
    assert same_bits(pairs[kept], expected[kept])
