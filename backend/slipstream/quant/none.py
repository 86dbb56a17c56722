"""Weights in the dtype of the model, whatever the checkpoint has."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around, Matrix
from slipstream.quant.auto import dequantised
from slipstream.quant.scheme import MatrixSource, Scheme


class Unquantized(Scheme):
    """Matrices as they are in the checkpoint, under one another."""

    name = "none"

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Matrix:
        """Read `NAME.weight` of all names; quantised ones are dequantised."""
        sizes = list(zip(names, outputs, strict=True))
        parts = [w.quantized(name, rows, inputs) for name, rows in sizes]
        if not any(parts):
            return Matrix(w.stacked([f"{name}.weight" for name in names], outputs, inputs))
        return Matrix(dequantised(w, sizes, parts, inputs))

    def matmul(self, x: Tensor, weights: Matrix, bias: Tensor | None) -> Tensor:
        """`x W^T + b`, rounded once."""
        return linear(x, weights, Around(bias=bias))


SCHEME = Unquantized()
