"""A matrix product in e4m3: a scale for each output of the weights and for each token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.elementwise import fp8
from slipstream.kernels.gemm.cublaslt import matmul
from slipstream.kernels.gemm.linear import own_kernel
from slipstream.kernels.gemm.sm90 import gemv
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.layers.source import WeightSource


class QuantizedLinear:
    """`Linear`, its matrix quantised as it is loaded: one at a time has its 16-bit numbers too.

    One row of activations is left as it is where there is a kernel for that: what takes time then
    is to read the weights. Two rows are, too, unless a kernel that scales its product takes them.
    """

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

    def of_norm(self, norm: Norm, residual: Residual) -> tuple[Tensor, fp8.Scales | None]:
        """The product with `norm(residual)`, `[n, out]`, and what it is still to be scaled by."""
        if self._is_for_few(norm, residual, gated=False):
            return self._few(residual.values, norm=norm.weight, eps=norm.eps), None
        x = residual.quantized(norm)
        if (own := self._own_kernel(x.values)) is not None:
            return own(x.values, self.weight.values, scales=self._scales(x)), None
        product, scales = self._product(x), self._scales(x)
        if self.dtype == product.dtype:
            return product, scales
        return fp8.scale(product, scales.rows, scales.columns, self.dtype, scales.bias), None

    def gate_of_norm(self, norm: Norm, residual: Residual) -> Tensor | fp8.Quantized:
        """`silu(gate) * up` of `[gate | up]`, the product with `norm(residual)`; `[n, out / 2]`."""
        if self._is_for_few(norm, residual, gated=True):
            return self._few(residual.values, norm=norm.weight, eps=norm.eps, gated=True)
        x = residual.quantized(norm)
        if (own := self._own_kernel(x.values, gated=True)) is not None:
            return fp8.quantize(
                own(x.values, self.weight.values, gated=True, scales=self._scales(x))
            )
        return fp8.silu_mul_quantize(self._product(x), *self._scales(x))

    def add_to(self, residual: Residual, x: Tensor | fp8.Quantized) -> None:
        """`residual [n, out] += ` the product with `x [n, in]`."""
        if isinstance(x, Tensor):
            if self._are_few(len(x)) and gemv.takes(x, self.weight.values):
                self._few(x, residual=residual.values)
                return
            x = fp8.quantize(x)
        if (own := self._own_kernel(x.values)) is not None:
            own(x.values, self.weight.values, residual=residual.values, scales=self._scales(x))
        else:
            residual.add_later(self._product(x), self._scales(x))

    def _product(self, x: fp8.Quantized) -> Tensor:
        pair = (x.values, self.weight.values)
        return (own_kernel(*pair) or matmul)(*pair)

    def _scales(self, x: fp8.Quantized) -> fp8.Scales:
        return fp8.Scales(x.scales, self.weight.scales, self.bias)

    def _own_kernel(self, x: Tensor, gated: bool = False) -> Callable[..., Tensor] | None:
        """One that scales its product with e4m3 rows itself; to bf16, so only in models of that."""
        if self.dtype != torch.bfloat16:
            return None
        return own_kernel(x, self.weight.values, gated)

    def _are_few(self, num_rows: int, gated: bool = False) -> bool:
        if num_rows > gemv.MAX_ROWS:
            return False
        like = self.weight.values[:num_rows]  # of the type and width that the rows would have
        return num_rows == 1 or self._own_kernel(like, gated) is None

    def _is_for_few(self, norm: Norm, residual: Residual, gated: bool) -> bool:
        if not self._are_few(len(residual), gated):
            return False  # before a look at the sum, which would add what is to be added later
        return gemv.takes(residual.values, self.weight.values, norm.weight, gated)

    def _few(self, x: Tensor, **around: Any) -> Tensor:
        weight, scales = self.weight
        return gemv.gemv(x, weight, bias=self.bias, scales=scales, **around)
