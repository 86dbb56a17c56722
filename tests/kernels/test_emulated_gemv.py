"""The GEMV between the stages around it: its CUDA source, emulated, against the oracle."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.tiers import quick_of
from slipstream.kernels.elementwise.activation import EVERY
from slipstream.kernels.gemm.op import Around, gemm
from slipstream.kernels.gemm.sm90.gemv import gemv
from slipstream.kernels.runtime import jit
from torch import Tensor

OUTPUTS = 50
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
