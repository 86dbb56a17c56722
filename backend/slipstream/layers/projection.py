"""The matrix products of a block, in the form that the source of the weights asks for."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.elementwise.fp8 import Quantized, Scales
from slipstream.layers.linear import Linear
from slipstream.layers.norm import Norm
from slipstream.layers.quantized import QuantizedLinear
from slipstream.layers.residual import Residual
from slipstream.layers.sliced import Sliced
from slipstream.layers.source import WeightSource


class Projection(Protocol):
    """`y = x W^T + b` between a norm, or another product, and a gate or the residual sum."""

    def of_norm(self, norm: Norm, residual: Residual) -> tuple[Tensor, Scales | None]:
        """The product with `norm(residual)`, `[n, out]`, and what it is still to be scaled by."""

    def gate_of_norm(self, norm: Norm, residual: Residual) -> Tensor | Quantized:
        """`silu(gate) * up` of `[gate | up]`, the product with `norm(residual)`; `[n, out / 2]`.

        In the form in which another projection of the model takes it.
        """

    def add_to(self, residual: Residual, x: Tensor | Quantized) -> None:
        """`residual [n, out] += ` the product with `x [n, in]`."""


class Normed:
    """A projection whose product is normalised before it is added to the residual sum."""

    def __init__(self, projection: Projection, norm: Norm) -> None:
        self._projection = projection
        self._norm = norm
        self.of_norm = projection.of_norm
        self.gate_of_norm = projection.gate_of_norm

    def add_to(self, residual: Residual, x: Tensor | Quantized) -> None:
        """`residual [n, out] += ` the norm of the product with `x [n, in]`."""
        values = residual.values
        product = Residual(torch.zeros_like(values))
        self._projection.add_to(product, x)
        values += self._norm(product.values)


def normed(projection: Projection, norm: Norm | None) -> Projection:
    """The projection, with a norm behind it if there is one."""
    return projection if norm is None else Normed(projection, norm)


def project(
    w: WeightSource,
    names: Sequence[str],
    outputs: Sequence[int],
    inputs: int,
    bias: bool = False,
) -> Projection:
    """From `inputs` numbers to `outputs[i]` of `names[i]`, all packed into one matrix."""
    kind = QuantizedLinear if w.quantization == "fp8" else Linear
    projection = kind(w, names, outputs, inputs, bias)
    return Sliced(projection) if w.deterministic else projection
