"""What the tests of e4m3 share: the numbers that a quantised row stands for, and products."""

import torch
from slipstream.kernels.elementwise import fp8
from slipstream.kernels.elementwise.fp8 import Quantized
from slipstream.kernels.elementwise.rope import rope_and_cache
from torch import Tensor


def dequantized(x: Quantized) -> Tensor:
    """In fp64."""
    return x.values.double() * x.scales.double()[:, None]


def is_rounded(x: Quantized, exact: Tensor) -> bool:
    """Half a unit in the last of 4 bits, or of the smallest number; and the scale is the row's."""
    error = (dequantized(x) - exact).abs()
    scales = exact.abs().amax(-1).clamp_min(1e-30) / 448
    slack = 1e-6  # what fp32 may lose where addends of order 1 cancel
    allowed = torch.maximum(exact.abs() * 2.0**-4, scales[:, None] * 2.0**-10) * 1.001 + slack
    fits = (error <= allowed).all() and (
        (x.scales - scales).abs() <= scales * 1e-5 + slack / 448
    ).all()
    return bool(fits)


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


class Rotation:
    """A packed bf16 product of 6 query and 2 key heads, and where its keys and values go."""

    def __init__(self, n: int, head_size: int, device: str = "cpu", bias: bool = False) -> None:
        heads = (6, 2, 2)
        product = random_product(n, sum(heads) * head_size, torch.bfloat16, device, seed=n)
        self.product, rows, columns, biases = product
        self.scales = fp8.Scales(rows, columns, biases if bias else None)
        self.norm = 1 + 0.1 * biases[:head_size]
        self._sizes = [count * head_size for count in heads]
        self._head_size, self._n = head_size, n
        angles = torch.rand(9, head_size // 2, device=device) * 6
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        self._positions = torch.arange(n, device=device) % 9
        self._slots = torch.arange(n, device=device) * 2 - 1  # the first writes nothing

    def __call__(
        self, qkv: Tensor, scales: fp8.Scales | None, norms: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries, and the cache."""
        qkv, d = qkv.clone(), self._head_size
        shape = (self._n // 4 + 1, 2, 2, 8, d)
        cache = torch.full(shape, float("nan"), dtype=qkv.dtype, device=qkv.device)
        q, k, v = (x.unflatten(1, (-1, d)) for x in torch.split(qkv, self._sizes, 1))
        norm = self.norm if norms else None
        where = (self._cos_sin, self._positions, self._slots, cache)
        rope_and_cache(q, k, v, *where, norm, norm, 1e-5, scales)
        return q, cache


def random_product(
    n: int, width: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Product, scales of rows and columns, and biases; the products are of order 1 once scaled."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows, columns = (draw(size).sigmoid() * 2e-3 for size in (n, width))
    product = draw(n, width) * 1e6
    return product.to(torch.bfloat16), rows, columns, draw(width).to(dtype)
