"""The GEMV between the stages around it: its CUDA source, emulated, against the oracle."""

import pytest
import torch
from fixtures.kernels.emulation import emulate, on_ctas
from fixtures.kernels.lora import Adapted, Shape
from fixtures.tiers import quick_of
from slipstream.kernels.elementwise.activation import EVERY, activate
from slipstream.kernels.gemm.op import Around, TermTable, gemm, scratch_of
from slipstream.kernels.gemm.sm90.gemv import adapted, gemv
from slipstream.kernels.runtime import jit
from torch import Tensor

OUTPUTS = 50
BF16, CPU = torch.bfloat16, torch.device("cpu")
CASES = {  # rows, inputs, gate, whether a layer norm
    "layer norm, GELU": (1, 1000, EVERY + "gelu", True),
    "layer norm, GELU by tanh": (2, 2560, EVERY + "gelu, by tanh", True),
    "norm, ReLU": (2, 520, EVERY + "relu", False),
    "layer norm, SiLU": (1, 4096, "silu", True),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"layer norm, GELU"}))
def test_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind them bias and residual; x has a mean that hides what one pass of a norm would keep."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 2)
    rows, inputs, gate, is_centred = CASES[name]
    rng = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng).bfloat16()

    residual = drawn(rows, OUTPUTS // (2 if gate == "silu" else 1))
    shift = drawn(inputs) if is_centred else None
    stages = {"norm": drawn(inputs), "shift": shift, "bias": drawn(OUTPUTS), "gate": gate}
    around = Around(eps=1e-5, is_centred=is_centred, residual=residual.clone(), **stages)
    x, weight = drawn(rows, inputs) + 20, drawn(OUTPUTS, inputs) / 16
    found = gemv(x, weight, around)
    wanted = gemm.oracle(x, weight, around._replace(residual=residual))
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0.008)


INT8 = {"one row": (1, 1024, "silu"), "two rows": (2, 4112, ""), "long": (1, 14336, "")}


@pytest.mark.parametrize("name", quick_of(INT8, {"one row"}))
def test_weights_of_int8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of the type, at every place of a piece."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 2)
    rows, inputs, gate = INT8[name]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=rng).bfloat16()
    weight = torch.randint(-128, 128, (OUTPUTS, inputs), generator=rng, dtype=torch.int8)
    weight[0, :256] = torch.arange(-128, 128)
    columns = torch.rand(OUTPUTS, generator=rng) / inputs
    norm = torch.ones(inputs).bfloat16() if gate else None
    around = Around(norm, 1e-5, columns=columns, gate=gate)
    found, wanted = gemv(x, weight, around), gemm.oracle(x, weight, around)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0.008)


@pytest.mark.parametrize("numbers", quick_of([[0, 0], [2, 1]], [[2, 1]]), ids=["no adapter", "two"])
def test_outputs_of_several_batches_have_terms(
    numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CTA finishes outputs while it still asks for weights, as of wide gates for two rows."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 2)
    size, inputs = 340, 512  # of a CTA 170: 64 at once, and 96 in the ring
    made = Adapted(Shape(inputs, (size, size), ((16, 3), (40, 0))), BF16, "cpu", by_launchers=True)
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * size, inputs, generator=rng).to(BF16) / inputs**0.5
    x, scratch = torch.randn(2, inputs, generator=rng).to(BF16), scratch_of(made.width, CPU)
    table = made.table(numbers)
    terms = TermTable(table.groups, table.rows, 1, scratch, (size, size))
    product = gemm.oracle(x.float(), weight, Around())
    wanted = activate("silu", made.by_torch(product, x, numbers))
    for _ in range(2):
        y = torch.zeros(2, size, dtype=BF16)
        around = Around(gate="silu", residual=y)
        on_ctas(2, lambda around=around: adapted(x, weight, around, terms))  # type: ignore[misc]
        assert ((y.float() - wanted).abs() / (1 + wanted.abs())).max() < 2**-6
        assert not scratch[:2].any()
