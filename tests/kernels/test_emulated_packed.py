"""GEMMs with packed weights: their CUDA source, emulated, against the oracle."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.packed_cases import (
    BLOCKS,
    BYTES_SHARED,
    FLOATS,
    FORMS,
    HALVES,
    PAIR,
    RECORDS,
    SHARED,
    WIDE,
    Form,
    packed_pair,
    quantized,
)
from fixtures.tiers import quick_of
from slipstream.kernels.gemm import packed, unpacked
from slipstream.kernels.gemm.op import E4M3, Around, gemm
from slipstream.kernels.gemm.sm90.packed_pipe import packed_pipe, pipe_scaled
from slipstream.kernels.gemm.sm90.packed_stream import packed_stream
from slipstream.kernels.runtime import jit
from slipstream.quant.forms import make_packed, make_records
from slipstream.quant.matrix import Kind, QuantMatrix, dequantise
from torch import Tensor


class Case(NamedTuple):
    kernel: Callable[..., Tensor]
    rows: int
    outputs: int
    inputs: int
    form: Form = FORMS[0]
    gate: str = ""


CASES = {
    # Inputs that end within a block, which two of a warp's pieces share out.
    "stream, gated": Case(packed_stream, 3, 64, 2088, gate="silu"),
    "stream, zeros": Case(packed_stream, 1, 40, 520, FORMS[1]),
    # Two passes over x, whose slots hold all of it, or not.
    "stream, several passes": Case(packed_stream, 8, 192, 2176),
    "stream, sixteen columns": Case(packed_stream, 11, 48, 520, FORMS[2]),
    "stream, 8 bits": Case(packed_stream, 8, 176, 4104, FORMS[7]),
    "stream, floats": Case(packed_stream, 2, 48, 264, FLOATS[0]),
    "stream, e4m3": Case(packed_stream, 2, 48, 520, BLOCKS),
    "stream, minimums": Case(packed_stream, 3, 64, 2088, SHARED, gate="silu"),
    "stream, minimums of 8 bits": Case(packed_stream, 8, 176, 520, BYTES_SHARED),
    "stream, scales of 16": Case(packed_stream, 1, 48, 1032, HALVES),
    "packed, minimums": Case(packed.packed, 5, 48, 1032, PAIR),
    "packed, two scales and minimums": Case(packed.packed, 20, 64, 520, WIDE, gate="silu"),
    "pipe, minimums": Case(packed_pipe, 3, 288, 520, SHARED, gate="silu"),
    "pipe, scales of 16": Case(packed_pipe, 16, 128, 1032, HALVES),
    "pipe, two scales and minimums": Case(packed_pipe, 17, 128, 264, WIDE),
    "pipe, gated": Case(packed_pipe, 3, 288, 264, gate="silu"),
    "pipe, zeros": Case(packed_pipe, 16, 200, 520, FORMS[1]),
    # More blocks than slots.
    "pipe, long": Case(packed_pipe, 10, 128, 2088),
    "pipe, 8 bits": Case(packed_pipe, 1, 256, 1032, FORMS[7]),
    "pipe, floats": Case(packed_pipe, 8, 128, 520, FLOATS[0]),
    "pipe, e4m3": Case(packed_pipe, 8, 128, 520, FORMS[10]),
    "pipe, e4m3 scaled": Case(pipe_scaled, 17, 256, 264, FORMS[11]),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"stream, zeros"}))
def test_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the product are bias and residual, or a gate."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 2)
    case, rng = CASES[name], torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng).bfloat16()

    matrix = packed_pair(case.form, case.outputs, case.inputs)[0]
    residual = None if case.gate else drawn(case.rows, case.outputs)
    x = drawn(case.rows, case.inputs)
    around = Around(
        columns=matrix.scales, bias=drawn(case.outputs), gate=case.gate, groups=matrix.groups
    )
    wanted = gemm.oracle(x, matrix.values, around._replace(residual=_copied(residual)))
    found = case.kernel(x, matrix.values, around._replace(residual=residual))
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0.008)


@pytest.mark.parametrize("rows", quick_of((2, 16, 40), {16}))
@pytest.mark.parametrize("kib", quick_of((99, 226), {99}))
def test_products_of_any_gpu(rows: int, kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many warps as the shared memory of a CTA has room for."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 2)
    monkeypatch.setattr(jit, "shared_memory_limit", lambda _: kib << 10)
    matrix = packed_pair(FORMS[8], 32, 1160)[0]
    assert matrix.groups is not None
    tiles = packed.tiling(min(rows, 32), matrix.groups.packing, True, 2, kib << 10)
    assert tiles is not None
    assert tiles.warps == (16 if rows == 2 else 8) // (1 if kib == 226 else 2)
    x = torch.randn(rows, 1160, generator=torch.Generator().manual_seed(0)).bfloat16()
    around = Around(gate="silu", groups=matrix.groups)
    found = packed.packed(x, matrix.values, around)
    wanted = gemm.oracle(x, matrix.values, around)
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0.008)


@pytest.mark.parametrize("kernel", quick_of((packed_stream, packed_pipe), {packed_stream}))
@pytest.mark.parametrize("dtype", quick_of(packed.DTYPES, {torch.bfloat16}))
def test_every_code_of_e4m3_is_decoded_exactly(
    kernel: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs with a NaN among their weights are NaN, for any x; all others are exact."""
    emulate(monkeypatch)
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    matrix = QuantMatrix(Kind.F8, codes.view(E4M3), torch.ones(16, 1), 16, 16)
    made = make_packed(matrix)
    wanted = codes.view(E4M3).float()
    has_nan = wanted.isnan().any(1)
    assert has_nan.nonzero().flatten().tolist() == [7, 15]
    found = kernel(torch.eye(16, dtype=dtype), made.values, Around(groups=made.groups)).T
    assert torch.equal(found[~has_nan].float(), wanted[~has_nan])
    assert bool(found[has_nan].isnan().all())


def test_all_codes_of_e4m3_become_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = codes.masked_fill(codes & 0x7F == 0x7F, 0)
    scales = torch.tensor([2.0**-9, 3.0]).repeat(8)[:, None]
    matrix = QuantMatrix(Kind.F8, codes.view(E4M3), scales, 16, 16)
    made = make_packed(matrix)
    assert made.groups is not None
    for dtype in packed.DTYPES:
        found = unpacked.unpacked.launcher(made.values, made.groups, dtype)
        assert torch.equal(found, dequantise(matrix).to(dtype))


@pytest.mark.parametrize("kernel", quick_of((packed_stream, packed_pipe), {packed_stream}))
@pytest.mark.parametrize("form", quick_of(RECORDS, {SHARED}), ids=str)
def test_weights_with_records_are_read_exactly(
    form: Form, kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All codes beside many scales and minimums; inputs one at a time."""
    emulate(monkeypatch)
    if form is WIDE and kernel is packed_stream:
        kernel = packed.packed
    matrix = quantized(form, 16, 264)
    assert len(matrix.codes.unique()) == (256 if form.kind is Kind.W4 else 64)
    made = make_records(matrix)
    weight = dequantise(matrix)
    for first in range(0, 264, 8):
        x = torch.eye(264, dtype=torch.bfloat16)[first : first + 8]
        found = kernel(x, made.values, Around(groups=made.groups))
        assert torch.equal(found, weight[:, first : first + 8].T.bfloat16()), first


@pytest.mark.parametrize("form", quick_of(RECORDS, {HALVES}), ids=str)
def test_weights_with_records_become_16_bits(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    matrix = quantized(form, 21, 328)
    made = make_records(matrix)
    assert made.groups is not None
    for dtype in packed.DTYPES:
        found = unpacked.unpacked.launcher(made.values, made.groups, dtype)
        assert torch.equal(found, dequantise(matrix).to(dtype))


def _copied(residual: Tensor | None) -> Tensor | None:
    return None if residual is None else residual.clone()
