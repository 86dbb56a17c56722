"""Fused places of the deterministic mode: a slice of rows at a time (`layers/sliced.py`)."""

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import Quantized
from slipstream.kernels.elementwise.scales import Scales
from slipstream.kernels.gemm.linear import Operand
from slipstream.layers.linear import GatedLinear, LinearAdd, NormLinear
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.sliced import slices


class SlicedNormLinear(NormLinear):
    """A place behind a norm, a slice at a time."""

    def __init__(self, place: NormLinear) -> None:
        super().__init__(place.linear, place.leaves_scales)
        self._place = place

    def __call__(self, norm: RowNorm, residual: Residual) -> tuple[Tensor, Scales | None]:
        """Compute what `NormLinear` computes."""
        x = residual.values
        parts = [self._place(norm, Residual(x[part])) for part in slices(len(x))]
        if len(parts) == 1:
            return parts[0]
        scales = [scale for _, scale in parts if scale is not None]
        rows = [scale.rows for scale in scales]
        joined = scales[0]._replace(rows=torch.cat(rows)) if scales else None
        return torch.cat([product for product, _ in parts]), joined

    def norms_apart(self, norm: RowNorm, residual: Residual) -> bool:
        """Answer as `NormLinear` does, of the first slice."""
        x = residual.values
        return self._place.norms_apart(norm, Residual(x[slices(len(x))[0]]))


class SlicedGatedLinear(GatedLinear):
    """A place before a gate, a slice at a time."""

    def __init__(self, place: GatedLinear) -> None:
        super().__init__(place.linear, place.gate)
        self._place = place

    def __call__(self, norm: RowNorm, residual: Residual) -> Operand:
        """Compute what `GatedLinear` computes."""
        x = residual.values
        parts = [self._place(norm, Residual(x[part])) for part in slices(len(x))]
        if len(parts) == 1:
            return parts[0]
        quantized = [part for part in parts if isinstance(part, Quantized)]
        if quantized:
            values, scales = zip(*quantized, strict=True)
            return Quantized(torch.cat(values), torch.cat(scales))
        return torch.cat([part for part in parts if isinstance(part, Tensor)])


class SlicedLinearAdd(LinearAdd):
    """A place before the residual sum, a slice at a time."""

    def __init__(self, place: LinearAdd) -> None:
        super().__init__(place.linear, place.norm)
        self._place = place

    def __call__(self, x: Operand, residual: Residual) -> None:
        """Add what `LinearAdd` adds."""
        if self.linear.ranks is not None and self.norm is None:
            self.add_part(x, residual)
            return
        values = residual.values
        for part in slices(len(values)):
            rows = Residual(values[part])
            self._place(_rows(x, part), rows)
            _ = rows.values  # what was to be added later is added now

    def part(self, x: Operand, before: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what `LinearAdd` returns."""
        count = len(x if isinstance(x, Tensor) else x.values)
        parts = [
            self._place.part(_rows(x, part), None if before is None else before[part], dtype)
            for part in slices(count)
        ]
        return torch.cat(parts) if before is None else before


def _rows(x: Operand, part: slice) -> Operand:
    return x[part] if isinstance(x, Tensor) else Quantized(x.values[part], x.scales[part])
