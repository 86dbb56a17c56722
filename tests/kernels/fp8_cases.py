"""What the tests of e4m3 share: the numbers that a quantised row stands for, and products."""

import torch
from slipstream.kernels.fp8 import Quantized
from torch import Tensor


def dequantized(x: Quantized) -> Tensor:
    """In fp64."""
    return x.values.double() * x.scales.double()[:, None]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in the dtype of `x`."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def scaled(
    dtype: torch.dtype, product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None
) -> Tensor:
    """The product in its place, computed in a dtype."""
    values = product.to(dtype) * rows.to(dtype)[:, None] * columns.to(dtype)
    return values if bias is None else values + bias.to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """In the dtype of `gate_up`."""
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def random_product(
    n: int, width: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Product, scales of rows and columns, and biases; the products are of order 1 once scaled."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows, columns = (draw(size).exp() * 1e-3 for size in (n, width))
    product = draw(n, width) * 1e6
    return product.to(torch.bfloat16), rows, columns, draw(width).to(dtype)
