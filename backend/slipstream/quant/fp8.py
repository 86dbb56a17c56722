"""Weights in e4m3 with a scale for each output, made of the checkpoint's as they are loaded.

Rows of activations are quantised on the way to a product, with a scale for each, where a kernel
multiplies e4m3 by e4m3; kernels of one or two rows take them as they are.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around, Matrix
from slipstream.quant.rounding import rounded_e4m3
from slipstream.quant.scheme import MatrixSource, Scheme


class Fp8(Scheme):
    """e4m3 by output; one matrix at a time has its 16-bit numbers too."""

    name = "fp8"

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Matrix:
        """Read `NAME.weight` of all names and quantise them."""
        weight = w.stacked([f"{name}.weight" for name in names], outputs, inputs)
        return Matrix(*rounded_e4m3(weight))

    def matmul(self, x: Tensor, weights: Matrix, bias: Tensor | None) -> Tensor:
        """`x W^T + b`; the product of e4m3 by e4m3 is rounded to bf16 before it is scaled."""
        return linear(x, weights, Around(bias=bias))

    def check(self, sizes: Mapping[str, int], device: torch.device, dtype: torch.dtype) -> None:
        """Raise `ConfigError` if a GPU lacks what the e4m3 kernels need; a CPU takes any size."""
        if device.type == "cpu":
            return
        asked = "quantization = 'fp8' on a GPU"
        has_gpu = torch.cuda.is_available()
        if has_gpu and torch.cuda.get_device_capability(device) < eight_bits.MIN_CAPABILITY:
            raise ConfigError(f"{asked}: {torch.cuda.get_device_name(device)} has no e4m3 products")
        if dtype not in eight_bits.DTYPES:
            raise ConfigError(f"{asked} needs dtype float16 or bfloat16, not {dtype}")
        for name, size in sizes.items():
            if size % eight_bits.MULTIPLE or size > eight_bits.MAX_WIDTH:
                raise ConfigError(
                    f"{asked} needs sizes that are multiples of {eight_bits.MULTIPLE}, at most "
                    f"{eight_bits.MAX_WIDTH}: config.json has {name} = {size}"
                )


SCHEME = Fp8()
