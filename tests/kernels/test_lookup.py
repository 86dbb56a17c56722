"""Rows of packed weights by their numbers: the oracle, and the CUDA source emulated."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.packed_cases import (
    FLOATS,
    FORMS,
    RECORDS,
    SHARED,
    Form,
    packed_pair,
)
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.gemm.lookup import lookup, variants
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packed import DTYPES
from slipstream.kernels.gemm.unpacked import unpacked
from slipstream.kernels.gemm.unpacked import variants as of_whole_matrices
from slipstream.kernels.runtime.op import KernelError
from slipstream.layers.packed_rows import PackedRows

PLAIN = [each for each in (*FORMS, *FLOATS, *RECORDS) if not (each.has_order or each.has_factors)]
# The first and the last row of a tile, both of its halves, the last row of all, one twice.
IDS = [0, 15, 16, 7, 8, 36, 20, 20, 31, 3]


def made(form: Form, outputs: int, inputs: int, dtype: torch.dtype) -> Matrix:
    matrix, _ = packed_pair(form, outputs, inputs, dtype=dtype)
    assert matrix.groups is not None
    return matrix


@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_rows_are_those_of_the_matrix(form: Form) -> None:
    for dtype in DTYPES:
        values, factors, groups = made(form, 37, 264, dtype)
        whole, ids = unpacked(values, groups, dtype, factors), torch.tensor(IDS)
        assert torch.equal(lookup(values, ids, groups, dtype, factors), whole[ids])


def tier_of(form: Form, dtype: torch.dtype) -> object:
    """Two forms are for the quick tier; all of them, and each second with fp16, for the rest."""
    if dtype != torch.bfloat16:
        return pytest.mark.slow if PLAIN.index(form) % 2 else pytest.mark.rest
    return () if form in (PLAIN[0], SHARED) else pytest.mark.rest


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, marks=tier_of(form, dtype), id=f"{form}-{dtype}")
        for form in PLAIN
        for dtype in DTYPES
    ],
)
def test_the_kernel(form: Form, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of inputs that end within a block; more rows than a warp has."""
    values, factors, groups = made(form, 37, 264, dtype)
    wanted = lookup.oracle(values, torch.tensor(IDS), groups, dtype, factors)
    emulate(monkeypatch)
    for count in (1, 8, len(IDS)):
        ids = torch.tensor(IDS[:count])
        found = lookup.launcher(values, ids, groups, dtype, factors)
        assert torch.equal(found, wanted[:count])
        apart = torch.stack([ids, ids * 0], -1)[:, 0]
        assert torch.equal(lookup.launcher(values, apart, groups, dtype, factors), found)
    assert lookup.launcher(values, torch.tensor([], dtype=torch.int64), groups, dtype).shape == (
        0,
        264,
    )


@given(st.data())
def test_rows_of_any_matrix(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([*FORMS, *FLOATS, *RECORDS]))
    outputs, inputs = data.draw(st.integers(1, 70)), 8 * data.draw(st.integers(4, 40))
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, outputs - 1), max_size=20)), dtype=torch.long
    )
    matrix, weight = packed_pair(form, outputs, inputs, dtype=torch.bfloat16)
    table = PackedRows(matrix, torch.bfloat16)
    assert table.shape == (outputs, inputs)
    found, whole = table(ids), table.whole()
    assert torch.equal(found, whole[ids])
    near = 2.0**-7 if form.has_factors else 2.0**-8  # rounded twice behind factors
    torch.testing.assert_close(whole.float(), weight.float(), rtol=near, atol=1e-6)


def test_what_has_no_kernel_is_refused() -> None:
    values, _, groups = made(FORMS[0], 37, 264, torch.bfloat16)
    ids = torch.tensor(IDS)
    with pytest.raises(KernelError, match=r"lookup: rows of torch\.float32, not of fp16 or bf16"):
        lookup.launcher(values, ids, groups, torch.float32)
    turned = groups._replace(order=torch.arange(264))
    with pytest.raises(KernelError, match="inputs in another order"):
        lookup.launcher(values, ids, turned, torch.bfloat16)
    odd = groups._replace(packing=groups.packing._replace(inputs=260))
    with pytest.raises(KernelError, match="260 inputs are no multiple of 8"):
        lookup.launcher(values, ids, odd, torch.bfloat16)
    rows = groups._replace(packing=groups.packing._replace(for_e4m3=True))
    with pytest.raises(KernelError, match="codes for rows of e4m3"):
        lookup.launcher(values, ids, rows, torch.bfloat16)
    values, _, floats = made(FLOATS[0], 37, 264, torch.bfloat16)
    with pytest.raises(KernelError, match="scales of e2m1 are of another type"):
        lookup.launcher(values, ids, floats, torch.float16)


def test_all_packings_have_a_kernel() -> None:
    """As whole matrices that become 16 bits have."""
    mine, theirs = ({each.defines for each in of()} for of in (variants, of_whole_matrices))
    assert mine == theirs
