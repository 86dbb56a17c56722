"""Scales that are whole numbers of units: what is cut, moved and joined stays what it is."""

import pytest
import torch
from fixtures.kernels.packed_cases import (
    BYTES_SHARED,
    FORMS,
    HALVES,
    PAIR,
    RECORDS,
    SHARED,
    Form,
    quantized,
)
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.gemm import packing, records
from slipstream.kernels.runtime.registry import CPU, KNOWN
from slipstream.models.moves import with_columns, with_rows
from slipstream.quant.forms import form_of, make_records, takes_records
from slipstream.quant.matrix import Kind, QuantMatrix, dequantise, multiplied, selected, stack
from slipstream.quant.parts import inputs_of, of_zeros, padded
from slipstream.quant.units import in_units

HOPPER = KNOWN["sm_90a"]
PLAIN_4, PLAIN_8 = FORMS[2]._replace(has_zeros=False), FORMS[7]._replace(has_zeros=False)
forms = st.sampled_from(RECORDS)


def packed_weight(matrix: QuantMatrix) -> torch.Tensor:
    """What a matrix is once it is packed for a GPU, by whatever form takes it."""
    form = form_of(matrix, HOPPER, torch.bfloat16)
    assert form is not None
    made = form.make(matrix)
    assert made.groups is not None
    return packing.dense(made.values, made.groups)


@given(forms, st.integers(1, 40), st.integers(1, 40))
def test_records_have_an_inverse(form: Form, outputs: int, eighths: int) -> None:
    matrix = quantized(form, outputs, 8 * eighths)
    wanted = dequantise(matrix)
    assert torch.equal(dequantise(multiplied(matrix)), wanted)
    made = make_records(matrix)
    assert made.groups is not None
    assert torch.equal(packing.dense(made.values, made.groups), wanted)
    rest = made.groups.scales.transpose(1, 2).reshape(-1, *made.groups.scales.shape[1::2])
    assert not rest[outputs:].any(), "rows that are not there have scales of zero"


@pytest.mark.parametrize("form", RECORDS, ids=str)
def test_sizes_without_data_are_those_of_data(form: Form) -> None:
    matrix = quantized(form, 40, 768)
    meta = _on_meta(matrix)
    assert takes_records(meta, HOPPER, torch.float16)
    ours, theirs = make_records(matrix), make_records(meta)
    assert ours.groups is not None
    assert theirs.groups is not None
    assert theirs.groups.packing == ours.groups.packing
    assert theirs.values.shape == ours.values.shape
    assert theirs.groups.scales.shape == ours.groups.scales.shape
    bits = 8 * (ours.values.nbytes + ours.groups.scales.nbytes) / (48 * 768)
    assert bits == made_bits(form)


def made_bits(form: Form) -> float:
    """Bits of a weight with its share of a record."""
    return (4 if form in (PAIR, SHARED) else 8) + 8 * records.BYTES[form.record] / records.INPUTS


def _on_meta(matrix: QuantMatrix) -> QuantMatrix:
    names = QuantMatrix.__dataclass_fields__
    values = {name: getattr(matrix, name) for name in names}
    return QuantMatrix(
        **{n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in values.items()}
    )


@given(forms, st.integers(0, 31), st.integers(1, 32))
def test_any_inputs_of_a_matrix(form: Form, begin: int, count: int) -> None:
    """Where pairs of groups are cut, scales are multiplied."""
    matrix = quantized(form, 3, 512)
    begin, count = 8 * begin, 8 * count
    part = inputs_of(matrix, begin, count)
    wanted = dequantise(matrix)[:, begin : begin + count]
    assert torch.equal(dequantise(part), wanted)
    if part.units is not None and takes_records(part, HOPPER, torch.bfloat16):
        assert torch.equal(packed_weight(part), wanted)
    more = padded(part, 512)
    assert torch.equal(dequantise(more)[:, :count], wanted)
    assert not dequantise(more)[:, count:].any()


@pytest.mark.parametrize("form", RECORDS, ids=str)
def test_parts_in_whole_blocks_keep_their_units(form: Form) -> None:
    matrix = quantized(form, 3, 1024)
    part = inputs_of(matrix, 256, 512)
    assert (part.units is None) == (form.record == "pair")
    assert torch.equal(packed_weight(part), dequantise(matrix)[:, 256:768])
    assert torch.equal(packed_weight(padded(part, 1024))[:, :512], dequantise(part))
    assert not dequantise(of_zeros(matrix)).any()


@pytest.mark.parametrize("form", RECORDS, ids=str)
def test_rows_and_columns_that_move(form: Form) -> None:
    matrix, sources = quantized(form, 5, 256), torch.tensor([4, -1, 0])
    wanted = dequantise(matrix)
    moved = with_rows(matrix, sources)
    assert torch.equal(dequantise(moved)[[0, 2]], wanted[[4, 0]])
    assert not dequantise(moved)[1].any()
    assert torch.equal(dequantise(selected(matrix, sources[[0, 2]])), wanted[[4, 0]])
    places = torch.randperm(256)
    assert torch.equal(dequantise(with_columns(matrix, places)), wanted[:, places])


@pytest.mark.parametrize(
    "types",
    [
        (SHARED, HALVES),
        (SHARED, SHARED, HALVES),
        (SHARED, BYTES_SHARED),
        (HALVES, PLAIN_8),
        (PLAIN_4, PLAIN_8, PAIR),
        tuple(RECORDS),
    ],
    ids=lambda types: ", ".join(map(str, types)),
)
def test_types_under_one_another_are_one_unrounded(types: tuple[Form, ...]) -> None:
    parts = [quantized(form, 3 + i, 512) for i, form in enumerate(types)]
    assert stack(parts) is None
    wide = in_units(parts)
    assert wide is not None
    whole = stack(wide)
    assert whole is not None
    wanted = torch.cat([dequantise(each) for each in parts])
    assert torch.equal(dequantise(whole), wanted)
    assert takes_records(whole, HOPPER, torch.float16)
    assert not takes_records(whole, CPU, torch.float32)
    assert torch.equal(packed_weight(whole), wanted)


def test_what_has_no_units_is_not_joined() -> None:
    shared = quantized(SHARED, 3, 256)
    by_16 = Form(Kind.W8, 16, torch.float16)  # neighbours have scales that differ
    for other in (FORMS[0], FORMS[1], FORMS[8], FORMS[9], by_16):
        assert in_units([shared, quantized(other, 3, 256)]) is None
    assert in_units([shared, multiplied(shared)]) is None
