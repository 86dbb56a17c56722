"""Rows of a matrix that is packed for GEMMs, which become numbers as they are looked up."""

import torch
from torch import Tensor

from slipstream.kernels.gemm import cpu_packing
from slipstream.kernels.gemm.lookup import lookup
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.unpacked import unpacked


class PackedRows:
    """A matrix of head or embedding, or of both, that stays packed.

    Args:
        matrix: `[rows, inputs]`, packed for a GPU's rows of 16 bits, or for a CPU's of 32.
        dtype: of the rows.
    """

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        assert matrix.groups is not None, "it is packed"
        packing, given = matrix.groups.packing, matrix.groups
        self._matrix, self.dtype = matrix, dtype
        self.shape = (packing.outputs, packing.inputs)
        self._groups = given._replace(order=None, factors=None)
        self._order, self._factors = given.order, given.factors
        self._is_tiled = packing.layout == cpu_packing.LAYOUT

    def __call__(self, ids: Tensor) -> Tensor:
        """Dequantise some rows: `[n] i64 -> [n, inputs]`."""
        values, factors, _ = self._matrix
        if self._is_tiled:
            return self._arranged(cpu_packing.rows(values, self._groups, ids))
        return self._arranged(lookup(values, ids, self._groups, self.dtype, factors))

    def whole(self) -> Tensor:
        """Dequantise all rows."""
        values, factors, _ = self._matrix
        if self._is_tiled:
            return self._arranged(cpu_packing.dense(values, self._groups))
        return self._arranged(unpacked(values, self._groups, self.dtype, factors))

    def _arranged(self, rows: Tensor) -> Tensor:
        """Return rows whose inputs come as they do in front of a product."""
        if self._order is not None:
            rows = torch.empty_like(rows).index_copy_(1, self._order, rows)
        return rows if self._factors is None else (rows * self._factors).to(rows.dtype)
