"""A matrix product in e4m3: a scale for each output of the weights and for each token."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels import fp8
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Addend, Residual
from slipstream.layers.source import WeightSource


class QuantizedLinear:
    """`Linear`, its matrix quantised as it is loaded: one at a time has its 16-bit numbers too."""

    def __init__(
        self,
        w: WeightSource,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        bias: bool = False,
    ) -> None:
        weight = w.packed([f"{name}.weight" for name in names], outputs, inputs)
        self.dtype = weight.dtype
        self.weight = fp8.quantize(weight)
        self.bias = w.packed([f"{name}.bias" for name in names], outputs) if bias else None

    def of_norm(self, norm: Norm, residual: Residual) -> Tensor:
        """The product with `norm(residual)`; `[n, out]`."""
        x = residual.quantized(norm)
        product = fp8.matmul(x.values, self.weight.values)
        return fp8.scale(product, x.scales, self.weight.scales, self.dtype, self.bias)

    def gate_of_norm(self, norm: Norm, residual: Residual) -> fp8.Quantized:
        """`silu(gate) * up` of `[gate | up]`, the product with `norm(residual)`; `[n, out / 2]`."""
        x = residual.quantized(norm)
        product = fp8.matmul(x.values, self.weight.values)
        return fp8.silu_mul_quantize(product, x.scales, self.weight.scales, self.bias)

    def add_to(self, residual: Residual, x: Tensor | fp8.Quantized) -> None:
        """`residual [n, out] += ` the product with `x [n, in]`."""
        x = fp8.quantize(x) if isinstance(x, Tensor) else x
        product = fp8.matmul(x.values, self.weight.values)
        residual.add_later(Addend(product, x.scales, self.weight.scales, self.bias))
