"""The GEMV with terms of adapters: its CUDA source, emulated, against torch."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.lora import Adapted, Shape
from fixtures.tiers import quick_of
from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.gemm.op import Around, TermTable, gemm, scratch_of
from slipstream.kernels.gemm.sm90.gemv import adapted
from slipstream.kernels.runtime import jit
from torch import Tensor

BF16 = torch.bfloat16
CASES = {  # inputs, outputs of parts, ranks of three adapters, adapters of rows, gate
    "behind a norm, stacked": (1024, (34, 10, 22), ((16, 0, 3), (40, 8, 0), (0,) * 3), [1], ""),
    "two rows, two adapters": (520, (34, 10, 22), ((16, 0, 3), (40, 8, 0), (0,) * 3), [2, 1], ""),
    "one row of two": (1000, (30, 30), ((16, 16), (1, 0), (0, 9)), [0, 1], "silu"),
    "two rows of one": (2048, (18, 18), ((16, 5), (1, 0), (0, 9)), [1, 1], "silu"),
    "many ranks": (256, (12,), ((300,), (512,), (16,)), [2, 1], "residual"),
    "many inputs": (16384, (9,), ((16,), (0,), (2,)), [1], "residual"),
    "none has a term": (512, (20,), ((16,), (0,), (2,)), [2, 0], "residual"),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"behind a norm, stacked", "one row of two"}))
def test_terms_are_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, as what a launch leaves must serve the next; rows without a term keep their bits."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 1)  # CTAs run one after another
    inputs, sizes, ranks, numbers, stage = CASES[name]
    made = Adapted(Shape(inputs, sizes, ranks), BF16, "cpu", by_launchers=True)
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(BF16)

    rows, outputs = len(numbers), sum(sizes)
    gate = stage if stage == "silu" else ""
    norm = None if stage == "residual" else drawn(inputs)
    x, weight, bias = 3 * drawn(rows, inputs), drawn(outputs, inputs) / 16, drawn(outputs)
    residual = drawn(rows, outputs) if stage == "residual" else None
    scratch = scratch_of(made.width, torch.device("cpu"))
    table = made.table(numbers)
    terms = TermTable(table.groups, table.rows, 1, scratch, sizes)

    plain = gemm.oracle(x, weight, Around(norm, 1e-5, bias=bias))
    behind = x if norm is None else rms_norm(x, norm, 1e-5, False)
    wanted = made.by_torch(plain, behind, numbers)
    if gate:
        wanted = activate(gate, wanted)
    if residual is not None:
        wanted = wanted + residual.float()
    for _ in range(2):
        own = None if residual is None else residual.clone()
        around = Around(norm, 1e-5, bias=bias, gate=gate, residual=own)
        found = adapted(x, weight, around, terms).float()
        assert ((found - wanted).abs() / (1 + wanted.abs())).max() < 2**-6
        assert scratch[:2].tolist() == [0, 0]
