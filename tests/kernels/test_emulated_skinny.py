"""Skinny GEMMs without clusters: their CUDA source, emulated, against the oracle."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.tiers import quick_of
from slipstream.kernels.gemm.linear import choose
from slipstream.kernels.gemm.op import Around, Spec, gemm
from slipstream.kernels.gemm.sm90.skinny import skinny
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import Target

# Rows of x; outputs, of which eight multiprocessors have a tile each, the last one cut; inputs.
CASES = {
    "two groups": (70, 504, 256, False),
    "three groups": (129, 1008, 256, True),
    "three groups, whole": (192, 1792, 192, True),
}


@pytest.mark.parametrize("name", quick_of(CASES, {"two groups", "three groups"}))
@pytest.mark.parametrize("dtype", quick_of((torch.bfloat16, torch.float16), {torch.bfloat16}))
def test_products(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias, and added to a residual or gated."""
    emulate(monkeypatch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 8)
    rows, outputs, inputs, is_gated = CASES[name]
    rng = torch.Generator().manual_seed(1)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=rng).to(dtype)

    x, weight = drawn(rows, inputs), drawn(outputs, inputs) * inputs**-0.5
    around = Around(bias=drawn(outputs), gate="silu" if is_gated else "")
    residual = None if is_gated else drawn(rows, outputs)
    other = None if residual is None else residual.clone()
    wanted = gemm.oracle(x, weight, around._replace(residual=other))
    found = skinny(x, weight, around._replace(residual=residual))
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("outputs", [28672, 14336, 6144])
def test_169_to_192_rows_are_taken_with_a_gate(outputs: int) -> None:
    """Where a multiprocessor has a tile of 128 outputs and more, in 16 bits."""
    bf16, target = torch.bfloat16, Target("cuda", "sm_90a", 132)

    def chosen(rows: int, gate: str = "silu") -> str:
        spec = Spec(
            *(rows, 4096, outputs, bf16, bf16, bf16),
            *("", "", False, gate, False, True, True, True, True, target),
        )
        return choose(spec).gemm.name

    kernel = "cublaslt" if outputs == 6144 else "skinny"
    found = [chosen(rows) for rows in (128, 129, 168, 169, 192)]
    assert found == ["skinny", "cublaslt", "cublaslt", kernel, kernel]
    assert chosen(193) != "skinny"
    assert chosen(176, gate="") == "cublaslt"
