"""Weights in the dtype of the model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around, Matrix
from slipstream.quant.scheme import MatrixSource, Scheme


class Unquantized(Scheme):
    """Matrices as they are in the checkpoint, under one another."""

    name = "none"

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Matrix:
        """Read `NAME.weight` of all names."""
        return Matrix(w.packed([f"{name}.weight" for name in names], outputs, inputs))

    def matmul(self, x: Tensor, weights: Matrix, bias: Tensor | None) -> Tensor:
        """`x W^T + b`, rounded once."""
        return linear(x, weights, Around(bias=bias))

    def bytes_per_weight(self, dtype: torch.dtype) -> float:
        """Bytes of the dtype."""
        return dtype.itemsize


SCHEME = Unquantized()
