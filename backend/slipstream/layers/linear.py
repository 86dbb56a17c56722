"""Linear layers, and the three places where a block has one: behind a norm, before a gate, before
the residual sum.

All of this is plain arithmetic, one step after the other. `slipstream.fuse` rewrites the places
into GEMMs that fuse the stages around them; stages that it cannot fuse run in the code here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import quant
from slipstream.kernels.comm.ranks import Ranks
from slipstream.kernels.elementwise.activation import activate
from slipstream.kernels.elementwise.scales import Scales
from slipstream.kernels.gemm.linear import Operand
from slipstream.kernels.gemm.op import Matrix, TermTable
from slipstream.layers.norm import RowNorm
from slipstream.layers.residual import Residual
from slipstream.layers.sliced import ROWS, sliced
from slipstream.layers.source import WeightSource
from slipstream.quant.scheme import Scheme


class Stacked(NamedTuple):
    """The matrices that a layer has under one another."""

    names: tuple[str, ...]  # below the prefix that they were read from
    outputs: tuple[int, ...]  # of each
    inputs: int


class Linear:
    """`y = x W^T + b`, `W [out, in]` in some scheme; then the sum over ranks, if they share it.

    Args:
        scheme: of the weights.
        weights: what the scheme read.
        bias: `[out]`.
        is_sliced: whether a row's product may not depend on the rows beside it.
    """

    def __init__(
        self, scheme: Scheme, weights: Any, bias: Tensor | None = None, is_sliced: bool = False
    ) -> None:
        self.scheme = scheme
        self.weights = weights
        self.bias = bias
        self.is_sliced = is_sliced
        self.ranks: Ranks | None = None  # that have the other parts of its inputs
        self.stacked: Stacked | None = None  # where it was read
        self._product = sliced(self._multiply) if is_sliced else self._multiply

    @classmethod
    def read(
        cls,
        w: WeightSource,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        bias: bool = False,
    ) -> "Linear":
        """Read the layers `names`, of `outputs[i]` each; all are stacked in one matrix."""
        scheme = quant.scheme_of(w, names, w.quantization)
        weights = scheme.read(w, names, outputs, inputs)
        biases = w.stacked([f"{name}.bias" for name in names], outputs) if bias else None
        made = cls(scheme, weights, biases, w.deterministic)
        made.stacked = Stacked(tuple(names), tuple(outputs), inputs)
        return made

    @property
    def matrix(self) -> Matrix | None:
        """The weights as GEMMs take them; None where only the scheme multiplies with them."""
        return self.weights if isinstance(self.weights, Matrix) else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, in] -> [n, out]`."""
        y = self._product(x)
        return y if self.ranks is None else self.ranks.sum(y)

    def part_of(self, x: Tensor) -> Tensor:
        """Return what this rank adds to the sum over ranks."""
        return self._product(x)

    def product_of(self, x: Tensor) -> Tensor:
        """`x W^T` alone, `[n, in] -> [n, out]`, of any number of rows."""
        if not self.is_sliced:
            return self.scheme.matmul(x, self.weights, None)
        padded = torch.cat([x, x.new_zeros(-len(x) % ROWS, x.shape[1])])
        return sliced(lambda rows: self.scheme.matmul(rows, self.weights, None))(padded)[: len(x)]

    def _multiply(self, x: Tensor) -> Tensor:
        return self.scheme.matmul(x, self.weights, self.bias)


class NormLinear:
    """A linear layer of a norm of the residual sum.

    Args:
        linear: the layer.
        leaves_scales: whether the reader of the product applies scales that are left to it.
    """

    def __init__(self, linear: Linear, leaves_scales: bool = False) -> None:
        self.linear = linear
        self.leaves_scales = leaves_scales

    def __call__(self, norm: RowNorm, residual: Residual) -> tuple[Tensor, Scales | None]:
        """`linear(norm(residual))`, `[n, out]`, and the scales that are left to its reader."""
        return self.linear(norm(residual.values)), None

    def norms_apart(self, norm: RowNorm, residual: Residual) -> bool:
        """Whether the norm has a kernel of its own, in front of the GEMM."""
        return True

    def adapted(self, norm: RowNorm, residual: Residual, terms: TermTable) -> Tensor | None:
        """Return the product with terms of adapters added; None: it takes several kernels."""
        return None


class GatedLinear:
    """A linear layer of a norm, `[gate | up]`, with the gate applied, or with an activation of
    every column: `gate` is a name of `activate`.
    """

    def __init__(self, linear: Linear, gate: str) -> None:
        self.linear = linear
        self.gate = gate

    def __call__(self, norm: RowNorm, residual: Residual) -> Operand:
        """`act(gate) * up` of `linear(norm(residual))`; `[n, out / 2]`, quantised if the layer that
        reads it would quantise it.
        """
        return activate(self.gate, self.linear(norm(residual.values)))

    def adapted(self, norm: RowNorm, residual: Residual, terms: TermTable) -> Operand | None:
        """Compute it with terms of adapters before the gate; None: it takes several kernels."""
        return None


class LinearAdd:
    """A linear layer that is added to the residual sum, behind a norm if it has one (Gemma)."""

    def __init__(self, linear: Linear, norm: RowNorm | None = None) -> None:
        self.linear = linear
        self.norm = norm

    def __call__(self, x: Operand, residual: Residual) -> None:
        """`residual [n, out] += norm(linear(x))`."""
        assert isinstance(x, Tensor), "rows are quantised for a layer that takes such alone"
        if self.norm is None and self.linear.ranks is not None:
            self.add_part(x, residual)
            return
        y = self.linear(x)
        residual.values.add_(y if self.norm is None else self.norm(y))

    def adapted(self, x: Operand, residual: Residual, terms: TermTable) -> bool:
        """Add it with terms of adapters; False, and nothing done: it takes several kernels."""
        return False

    def add_part(self, x: Operand, residual: Residual) -> None:
        """Leave this rank's part to the sum over ranks that comes before the next reader."""
        ranks, dtype = self.linear.ranks, residual.dtype
        assert ranks is not None, "ranks share the layer"
        residual.add_part(ranks, lambda before: self.part(x, before, dtype))

    def part(self, x: Operand, before: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return this rank's `linear(x)`, `[n, out]` of `dtype`; added to `before` in place."""
        assert isinstance(x, Tensor), "rows are quantised for a layer that takes such alone"
        y = self.linear.part_of(x)
        return y if before is None else before.add_(y)
