"""The places of linear layers in a block, by GEMMs that fuse the stages around them.

Each falls back to the plain place where its layer has no matrix for GEMMs: a scheme that multiplies
by itself, or a stage between the product and what follows.
"""

import torch
from torch import Tensor

from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.elementwise.eight_bits import PRODUCTS
from slipstream.kernels.elementwise.scales import Scales
from slipstream.kernels.gemm.linear import (
    Operand,
    follow,
    multiply,
    multiply_adapted,
    route_of,
    takes_quantized,
)
from slipstream.kernels.gemm.op import Around, TermTable
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.norm import LayerNorm, Norm, RowNorm
from slipstream.layers.residual import Residual


def _behind_norm(
    linear: Linear, norm: RowNorm, residual: Residual, gate: str = ""
) -> tuple[Tensor, Around]:
    """Return the rows of a product behind a norm of the residual sum, and its stages.

    An RMS norm, a layer norm with a weight, and what has yet to be added to the sum, are among the
    stages; any other norm is computed here.
    """
    assert linear.ranks is None, "ranks share the inputs of layers that are added alone"
    if isinstance(norm, Norm):
        how = Around(norm.weight, norm.eps, norm.plus_one)
    elif isinstance(norm, LayerNorm) and norm.is_plain:
        how = Around(norm.weight, norm.eps, is_centred=True, shift=norm.bias)
    else:
        return norm(residual.values), Around(bias=linear.bias, gate=gate)
    x, addend = residual.take()
    return x, how._replace(bias=linear.bias, gate=gate, addend=addend)


def _adapted_behind_norm(
    linear: Linear, norm: RowNorm, residual: Residual, terms: TermTable, gate: str = ""
) -> Tensor | None:
    """Return a product behind a norm, with terms of adapters; None: it takes several kernels."""
    if linear.matrix is None or not isinstance(norm, Norm):  # another norm takes a kernel itself
        return None
    x, around = _behind_norm(linear, norm, Residual(residual.values), gate)
    return multiply_adapted(x, linear.matrix, around, terms)


class FusedNormLinear(NormLinear):
    """(residual, norm, quantise, linear): scales are left to a reader that applies them."""

    def __call__(self, norm: RowNorm, residual: Residual) -> tuple[Tensor, Scales | None]:
        """Compute what `NormLinear` computes."""
        matrix = self.linear.matrix
        if matrix is None:
            return super().__call__(norm, residual)
        x, around = _behind_norm(self.linear, norm, residual)
        y = multiply(x, matrix, around)
        if isinstance(y, Tensor):
            return y, None
        if self.leaves_scales and y.product.dtype == x.dtype:
            return y
        return y.finish(x.dtype), None

    def norms_apart(self, norm: RowNorm, residual: Residual) -> bool:
        """Answer as `NormLinear` does: a GEMM, or the kernel that quantises, may fuse the norm."""
        matrix = self.linear.matrix
        if matrix is None:
            return True
        if not isinstance(norm, Norm):
            return not isinstance(norm, LayerNorm)
        x, around = _behind_norm(self.linear, norm, Residual(residual.values))
        path = route_of(x, matrix, around).path
        return path.norms and not path.quantises

    def adapted(self, norm: RowNorm, residual: Residual, terms: TermTable) -> Tensor | None:
        """Compute what `NormLinear` computes."""
        return _adapted_behind_norm(self.linear, norm, residual, terms)


class FusedGatedLinear(GatedLinear):
    """(residual, norm, quantise, linear, gate, quantise).

    Args:
        feeds: the layer that reads the result; None: several, or unknown.
    """

    def __init__(self, linear: Linear, gate: str, feeds: Linear | None) -> None:
        super().__init__(linear, gate)
        self.feeds = feeds

    def __call__(self, norm: RowNorm, residual: Residual) -> Operand:
        """Compute what `GatedLinear` computes."""
        matrix = self.linear.matrix
        if matrix is None:
            return super().__call__(norm, residual)
        x, around = _behind_norm(self.linear, norm, residual, self.gate)
        route = route_of(x, matrix, around)
        y = follow(route, x, matrix, around)
        next_matrix = None if self.feeds is None else self.feeds.matrix
        if isinstance(y, Tensor):  # adapters of a reader with packed weights take it as it is
            if next_matrix is None or not route.path.quantises:
                return y
            dtype = next_matrix.values.dtype
            return eight_bits.quantize(y, dtype) if dtype in PRODUCTS else y
        takes = (
            next_matrix is not None
            and next_matrix.rounds_to == y.values
            and takes_quantized(next_matrix, len(y.product), x.dtype)
        )
        if takes and self.gate == "silu":
            return eight_bits.silu_mul_quantize(y.product, *y.scales)
        return activate(self.gate, y.finish(x.dtype))

    def adapted(self, norm: RowNorm, residual: Residual, terms: TermTable) -> Operand | None:
        """Compute what `GatedLinear` computes."""
        return _adapted_behind_norm(self.linear, norm, residual, terms, self.gate)


class Gated(GatedLinear):
    """A gate that no GEMM fuses, behind a place that may be fused."""

    def __init__(self, place: NormLinear, gate: str) -> None:
        super().__init__(place.linear, gate)
        self.place = place

    def __call__(self, norm: RowNorm, residual: Residual) -> Operand:
        """Compute what `GatedLinear` computes."""
        y, scales = self.place(norm, residual)
        assert scales is None, "a gate applies no scales"
        return activate(self.gate, y)


class FusedLinearAdd(LinearAdd):
    """(quantise, linear, residual): an unscaled product, or a part of a sum over ranks, is added on
    the way to the next norm.
    """

    def __call__(self, x: Operand, residual: Residual) -> None:
        """Add what `LinearAdd` without a norm adds."""
        matrix = self.linear.matrix
        if matrix is None:
            super().__call__(x, residual)
            return
        if self.linear.ranks is not None:
            self.add_part(x, residual)
            return
        y = multiply(x, matrix, Around(bias=self.linear.bias, residual=residual.values))
        if not isinstance(y, Tensor):
            residual.add_later(y)

    def adapted(self, x: Operand, residual: Residual, terms: TermTable) -> bool:
        """Add what `LinearAdd` adds."""
        if self.linear.matrix is None or self.linear.ranks is not None:
            return False
        around = Around(bias=self.linear.bias, residual=residual.values)
        return multiply_adapted(x, self.linear.matrix, around, terms) is not None

    def part(self, x: Operand, before: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what `LinearAdd` returns."""
        matrix = self.linear.matrix
        if matrix is None:
            return super().part(x, before, dtype)
        y = multiply(x, matrix, Around(bias=self.linear.bias, residual=before, out=dtype))
        if isinstance(y, Tensor):
            return y
        if before is None:
            return y.finish(dtype)
        y.add_to(before)
        return before


class NormedAdd(LinearAdd):
    """A norm that no GEMM fuses, between a place that may be fused and the residual sum."""

    def __init__(self, place: LinearAdd, norm: RowNorm) -> None:
        super().__init__(place.linear, norm)
        self.place, self._norm = place, norm

    def __call__(self, x: Operand, residual: Residual) -> None:
        """Add what `LinearAdd` adds."""
        values = residual.values
        product = Residual(torch.zeros_like(values))
        self.place(x, product)
        values += self._norm(product.values)
