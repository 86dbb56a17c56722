"""The e4m3 kernels at the shapes of Llama-3.1-8B."""

from collections.abc import Callable

import torch
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.gemm.cublaslt import matmul
from timing import DTYPE, FFN, HEAD_SIZE, HIDDEN, KV_HEADS, Q_HEADS, Result, measure, rows

QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE
PRODUCTS = {
    "qkv": (HIDDEN, QKV),
    "o": (Q_HEADS * HEAD_SIZE, HIDDEN),
    "gate_up": (HIDDEN, 2 * FFN),
    "down": (FFN, HIDDEN),
}


def scales(size: int) -> torch.Tensor:
    return torch.rand(size, device="cuda") * 1e-3


def rowwise(n: int) -> list[Result]:
    """What stands around the products."""

    def make_quantize() -> Callable[[], object]:
        x = rows(n, HIDDEN)
        return lambda: eight_bits.quantize(x)

    def make_norm() -> Callable[[], object]:
        x, norm = rows(n, HIDDEN), rows(HIDDEN)
        return lambda: eight_bits.norm_quantize(x, norm, 1e-5)

    def make_add_norm() -> Callable[[], object]:
        x, norm, product = rows(n, HIDDEN), rows(HIDDEN), rows(n, HIDDEN)
        by_row, by_column = scales(n), scales(HIDDEN)
        return lambda: eight_bits.add_norm_quantize(x, norm, product, by_row, by_column, 1e-5)

    def make_silu() -> Callable[[], object]:
        product, by_row, by_column = rows(n, 2 * FFN), scales(n), scales(2 * FFN)
        return lambda: eight_bits.silu_mul_quantize(product, by_row, by_column)

    def make_scale() -> Callable[[], object]:
        product, by_row, by_column = rows(n, QKV), scales(n), scales(QKV)
        return lambda: eight_bits.scale(product, by_row, by_column, DTYPE)

    return [
        measure("quantize", f"{n} x {HIDDEN}", make_quantize, n * HIDDEN * 3, 0),
        measure("norm_quantize", f"{n} x {HIDDEN}", make_norm, n * HIDDEN * 3, 0),
        measure("add_norm_quantize", f"{n} x {HIDDEN}", make_add_norm, n * HIDDEN * 7, 0),
        measure("silu_mul_quantize", f"{n} x {FFN}", make_silu, n * FFN * 5, 0),
        measure("scale", f"{n} x {QKV}", make_scale, n * QKV * 4, 0),
    ]


def products(n: int) -> list[Result]:
    """The limit counts twice the operations of 16 bits."""
    results = []
    for name, (inputs, outputs) in PRODUCTS.items():

        def make(inputs: int = inputs, outputs: int = outputs) -> Callable[[], object]:
            x, weight = (
                eight_bits.quantize(rows(n, inputs)),
                eight_bits.quantize(rows(outputs, inputs)),
            )
            return lambda: matmul(x.values, weight.values)

        size = inputs * outputs + n * (inputs + 2 * outputs)
        results.append(measure("fp8.matmul", f"{name} {n}", make, size, n * inputs * outputs))
    return results


def cases() -> list[Result]:
    """Small and large steps."""
    results = []
    for n in (1, 16, 128, 256, 4096):
        results += rowwise(n)
    for n in (16, 128, 256, 4096):
        results += products(n)
    return results
