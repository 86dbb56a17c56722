"""Weights that are multiplied with rows of their own type: e4m3 and int8, a scale for each row.

An output has one scale, and a row of activations, too, so sums of codes are scaled once. Nothing is
put into another order.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.gemm.linear import answers
from slipstream.kernels.gemm.op import Matrix, Spec
from slipstream.kernels.runtime.registry import Target
from slipstream.quant.matrix import Kind, QuantMatrix

_ROWS = (1, 2, 3, 8, 64, 256, 2048)  # for which there must be a GEMM


class Factored(NamedTuple):
    """Weights behind factors of inputs, which a kernel of its own applies: GEMMs fuse nothing."""

    matrix: Matrix
    factors: Tensor  # [k] f32

    def rows(self, x: Tensor) -> Tensor:
        """Return `x [n, k]` times the factors, in its dtype."""
        return (x * self.factors).to(x.dtype)


def rounds(matrix: QuantMatrix) -> bool:
    """Return whether kernels round rows of so many inputs to 8 bits."""
    return matrix.inputs % eight_bits.MULTIPLE == 0 and matrix.inputs <= eight_bits.MAX_WIDTH


def takes_e4m3(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    """Return whether GEMMs take weights in e4m3 by row, with rows in e4m3."""
    asks = matrix.kind is Kind.F8 and matrix.row_type == "e4m3"
    if not asks or target.device != "cuda" or dtype not in eight_bits.DTYPES:
        return False
    by_row = matrix.group >= matrix.inputs and matrix.is_symmetric and matrix.is_plain
    fits = rounds(matrix) and matrix.outputs % eight_bits.MULTIPLE == 0
    return by_row and fits and target.capability >= eight_bits.MIN_CAPABILITY


def make_e4m3(matrix: QuantMatrix) -> Matrix:
    """Return codes and scales as they are."""
    scales = matrix.scales[:, 0].float()
    scales = scales if matrix.outer is None else scales * matrix.outer
    return Matrix(matrix.codes.contiguous(), scales.contiguous())


def takes_int8(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    """Return whether GEMMs take weights in 8 bits by row, with rows in int8."""
    if matrix.row_type != "int8" or target.device != "cuda" or dtype not in eight_bits.DTYPES:
        return False
    by_row = matrix.group >= matrix.inputs and matrix.outer is None
    fits = matrix.kind is Kind.W8 and by_row and matrix.is_symmetric and matrix.order is None
    fits = fits and rounds(matrix) and matrix.outputs % eight_bits.MULTIPLE == 0
    return fits and _has_gemm(matrix.outputs, matrix.inputs, dtype, target)


@lru_cache
def _has_gemm(outputs: int, inputs: int, dtype: torch.dtype, target: Target) -> bool:
    """Whether GEMMs take weights in int8 with few rows and with many."""
    sizes, aligned = (inputs, outputs, dtype, torch.int8, dtype), (True,) * 4
    around = ("", "columns", False, "", False)
    specs = (Spec(rows, *sizes, *around, *aligned, target) for rows in _ROWS)
    return all(answers(spec)[0].refusal is None for spec in specs)


def make_int8(matrix: QuantMatrix) -> Matrix | Factored:
    """Return codes and scales as they are, behind factors if there are any."""
    made = Matrix(matrix.codes.contiguous(), matrix.scales[:, 0].float().contiguous())
    return made if matrix.factors is None else Factored(made, matrix.factors)
