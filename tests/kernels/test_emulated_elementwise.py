"""Activations by their CUDA source, run on a CPU."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from slipstream.kernels.elementwise.activation import gelu_mul, silu_mul, xielu
from slipstream.kernels.runtime import jit
from torch import Tensor

NUMBERS = torch.tensor([0.9, 1.4, 0.5, -1e-6])


def close(found: Tensor, expected: Tensor) -> None:
    """Compare within rounding of the dtype, which is once."""
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=2 * eps, equal_nan=True)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows within longer ones, with 0, tiny and huge numbers and infinities among them."""
    drawn = torch.randn(count, width + 8, generator=torch.Generator().manual_seed(width))
    x = (drawn * 3).to(dtype)
    special = torch.tensor([0.0, -1e-7, 1e-7, -80.0, float("-inf"), float("inf"), float("nan")])
    x[count // 2, : len(special)] = special[: width + 8]
    return x[:, :width]


@pytest.mark.parametrize("dtype", jit.DTYPES, ids=str)
def test_xielu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A width of vectors, and an odd one; of few rows, and of many, which share threads less."""
    emulate(monkeypatch)
    for count, width in ((1, 2064), (3, 35), (133, 264)):
        x = rows(count, width, dtype)
        close(xielu.launcher(x, NUMBERS), xielu.oracle(x, NUMBERS))


def test_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    for gate in (silu_mul, gelu_mul):
        x = rows(3, 528, torch.bfloat16)
        close(gate.launcher(x), gate.oracle(x))
