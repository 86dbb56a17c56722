"""Weights as the checkpoint has them: quantised ones stay so where a GEMM here takes them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around, Matrix
from slipstream.quant.forms import (
    Packed,
    form_of,
    product,
    read_numbers,
    takes_records,
    takes_tiles,
)
from slipstream.quant.matrix import QuantMatrix, stack, widened, write
from slipstream.quant.row_forms import Factored
from slipstream.quant.scheme import MatrixSource, Scheme
from slipstream.quant.units import in_units


class Auto(Scheme):
    """The checkpoint's own scheme, matrix by matrix; 16 bits where it has none."""

    name = "auto"

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Matrix | Packed | Factored:
        """Read the matrices `names`; those that differ in form are dequantised together."""
        sizes = list(zip(names, outputs, strict=True))
        parts = [w.quantized(name, rows, inputs) for name, rows in sizes]
        found = [part for part in parts if part is not None]
        if not found:
            return read_numbers(w, names, outputs, inputs)
        whole = joined(w, found) if len(found) == len(parts) else None
        if whole is not None:
            return kept(w, whole)
        kinds = " and ".join(sorted({str(part) for part in found}))
        w.note(_said(w, f"{kinds}, which differ within a GEMM"))
        return Matrix(dequantised(w, sizes, parts, inputs))

    def matmul(self, x: Tensor, weights: Matrix | Packed | Factored, bias: Tensor | None) -> Tensor:
        """`x W^T + b`; a bias behind torch's own GEMMs is added to the rounded one."""
        if isinstance(weights, Factored):
            x, weights = weights.rows(x), weights.matrix
        if isinstance(weights, Matrix):
            return linear(x, weights, Around(bias=bias))
        y = product(x, weights)
        return y if bias is None else y + bias


def joined(w: MatrixSource, parts: Sequence[QuantMatrix]) -> QuantMatrix | None:
    """Put matrices under one another: those of other bits, too, where kernels take them as 8 bits.

    On a GPU that are types of blocks: one GEMM with longer codes of a few rows takes less than
    a launch more. None where their forms differ.
    """
    whole = stack(parts)
    if whole is not None:
        return whole
    is_cpu = w.target.device == "cpu"
    wide = widened(parts) if is_cpu else in_units(parts)
    whole = None if wide is None else stack(wide)
    takes = takes_tiles if is_cpu else takes_records
    return whole if whole is not None and takes(whole, w.target, w.dtype) else None


def kept(w: MatrixSource, matrix: QuantMatrix) -> Matrix | Packed | Factored:
    """Return a matrix in the form that a GEMM takes, dequantised if none takes it; say which."""
    form = form_of(matrix, w.target, w.dtype)
    if form is not None:
        w.note(f"weights of {matrix}: {form.said(matrix)}")
        return form.make(matrix)
    w.note(_said(w, str(matrix)))
    out = torch.empty(matrix.outputs, matrix.inputs, dtype=w.dtype, device=w.device)
    write(matrix, out)
    return Matrix(out)


def _said(w: MatrixSource, kinds: str) -> str:
    dtype = str(w.dtype).removeprefix("torch.")
    return (
        f"weights of {kinds}: dequantised to {dtype} as they are loaded, which takes its memory "
        "and rounds them once; no GEMM here takes them as they are"
    )


def dequantised(
    w: MatrixSource,
    sizes: Sequence[tuple[str, int]],
    parts: Sequence[QuantMatrix | None],
    inputs: int,
) -> Tensor:
    """Return matrices under one another in the model's dtype, each of its scheme or of 16 bits."""
    outputs = [rows for _, rows in sizes]
    out = torch.empty(sum(outputs), inputs, dtype=w.dtype, device=w.device)
    for (name, rows), part, piece in zip(sizes, parts, torch.split(out, outputs), strict=True):
        if part is None:
            piece.copy_(w.stacked([f"{name}.weight"], [rows], inputs))
        else:
            write(part, piece)
    return out


class AtLoad(Auto):
    """Weights of 16 or 32 bits, rounded as they are loaded; activations stay as they are.

    `kept` says whether what was rounded must be dequantised again.

    Args:
        name: of the scheme.
        rounded: returns `[n, k]` in fewer bits.
    """

    def __init__(self, name: str, rounded: Callable[[Tensor], QuantMatrix]) -> None:
        self.name = name  # type: ignore[misc]  # of the object: there is one for each file
        self.rounded = rounded

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Matrix | Packed | Factored:
        """Read `NAME.weight` of all names and round them, unless an earlier start did."""
        full = [f"{name}.weight" for name in names]

        def made() -> Matrix | Packed | Factored:
            return kept(w, self.rounded(w.stacked(full, outputs, inputs)))

        return w.packed(full, outputs, inputs, made)


SCHEME = Auto()
