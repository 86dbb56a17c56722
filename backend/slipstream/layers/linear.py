"""A matrix product with a norm before it, or a residual sum or a gate after it."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.elementwise.fp8 import Quantized
from slipstream.kernels.gemm import linear
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class Linear:
    """`y = x W^T + b`, `W [out, in]`; projections of one input are packed into one matrix."""

    def __init__(
        self,
        w: WeightSource,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        bias: bool = False,
    ) -> None:
        self.weight = w.packed([f"{name}.weight" for name in names], outputs, inputs)
        self.bias = w.packed([f"{name}.bias" for name in names], outputs) if bias else None

    def of_norm(self, norm: Norm, residual: Residual) -> tuple[Tensor, None]:
        """The product with `norm(residual)`, `[n, out]`; there are no scales."""
        x = residual.values
        settings = (norm.eps, self.bias, norm.plus_one)
        return linear.norm_linear(x, norm.weight, self.weight, *settings), None

    def gate_of_norm(self, norm: Norm, residual: Residual) -> Tensor:
        """`silu(gate) * up` of `[gate | up]`, the product with `norm(residual)`; `[n, out / 2]`."""
        assert not norm.plus_one, "of_norm is for such norms"
        return linear.norm_gate_up(residual.values, norm.weight, self.weight, norm.eps, self.bias)

    def add_to(self, residual: Residual, x: Tensor | Quantized) -> None:
        """`residual [n, out] += ` the product with `x [n, in]`."""
        assert isinstance(x, Tensor), "another projection quantised it"
        linear.linear_add(x, self.weight, residual.values, self.bias)
