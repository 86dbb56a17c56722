"""GEMMs with packed weights behind a norm: their CUDA source, emulated, against the oracle."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.packed_cases import FLOATS, FORMS, Form, packed_pair, quantized
from fixtures.tiers import quick_of
from slipstream.kernels.gemm.op import Around, gemm
from slipstream.kernels.gemm.sm90.packed_pipe import packed_pipe
from slipstream.kernels.gemm.sm90.packed_stream import packed_stream
from slipstream.kernels.runtime import jit
from slipstream.quant.forms import make_packed_e4m3
from torch import Tensor


class Case(NamedTuple):
    kernel: Callable[..., Tensor]
    rows: int
    outputs: int
    inputs: int
    form: Form = FORMS[0]
    norm: str = "norm"
    gate: str = ""
    for_e4m3: bool = False


CASES = {
    # Inputs that end within a block, which two of a warp's pieces share out.
    "stream, gated": Case(packed_stream, 3, 64, 2088, gate="silu"),
    "stream, plus one": Case(packed_stream, 1, 40, 520, FORMS[1], "norm plus one"),
    # Two passes over x, whose slots hold all of it, or not.
    "stream, several passes": Case(packed_stream, 8, 192, 2176),
    "stream, without a norm": Case(packed_stream, 11, 48, 520, FORMS[2], ""),
    "stream, 8 bits": Case(packed_stream, 8, 176, 4104, FORMS[7]),
    "stream, floats": Case(packed_stream, 2, 48, 264, FLOATS[0], "norm plus one"),
    "stream, codes for e4m3": Case(packed_stream, 1, 40, 272, norm="norm plus one", for_e4m3=True),
    "stream, codes for e4m3, no norm": Case(packed_stream, 7, 64, 2096, norm="", for_e4m3=True),
    "stream, codes for e4m3, gated": Case(packed_stream, 3, 128, 528, gate="silu", for_e4m3=True),
    "pipe, gated": Case(packed_pipe, 3, 288, 264, gate="silu"),
    "pipe, plus one": Case(packed_pipe, 16, 200, 520, FORMS[1], "norm plus one"),
    # More blocks than slots.
    "pipe, long": Case(packed_pipe, 10, 128, 2088),
    "pipe, 8 bits": Case(packed_pipe, 1, 256, 1032, FORMS[7]),
    "pipe, floats": Case(packed_pipe, 8, 128, 520, FLOATS[0]),
    "pipe, without a norm": Case(packed_pipe, 5, 136, 264, FORMS[2], ""),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"stream, plus one"}))
def test_norms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have lengths of their own; behind the product are bias and residual."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 2)
    case, rng = CASES[name], torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng).bfloat16()

    sizes = (case.form, case.outputs, case.inputs)
    is_e4m3 = case.for_e4m3
    matrix = make_packed_e4m3(quantized(*sizes)) if is_e4m3 else packed_pair(*sizes)[0]
    outputs = case.outputs // (2 if case.gate else 1)
    residual = None if case.gate else drawn(case.rows, outputs)
    x = drawn(case.rows, case.inputs) * 3 ** torch.arange(1, case.rows + 1)[:, None]
    around = Around(
        norm=drawn(case.inputs) if case.norm else None,
        eps=0.5,
        plus_one=case.norm == "norm plus one",
        columns=matrix.scales,
        bias=drawn(case.outputs),
        gate=case.gate,
        groups=matrix.groups,
    )
    x = x if case.norm else x / 1000
    wanted = gemm.oracle(x, matrix.values, around._replace(residual=_copied(residual)))
    found = case.kernel(x, matrix.values, around._replace(residual=residual))
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0.008)


def _copied(residual: Tensor | None) -> Tensor | None:
    return None if residual is None else residual.clone()
