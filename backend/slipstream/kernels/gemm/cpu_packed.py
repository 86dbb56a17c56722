"""GEMMs by the processor's kernels: rows of fp32 with weights in tiles.

Beside weights of 4 and 8 bits rows become whole numbers, too, of 16 bits and a scale for each 32
inputs, which is as good as fp32; beside 4 bits they can have 8, as llama.cpp's have. Weights of 16
and 32 bits multiply rows as they are. A row's bits do not depend on the others (multiply.h).
"""

import ctypes
import functools

import torch
from torch import Tensor

from slipstream.kernels.cpu.native import Product, Weights, address, loaded, num_threads, row_bits
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.gemm.cpu_packing import FLOAT_MIDDLE, LAYOUT, MIDDLE, ROWS
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.gemm.packing import TILE, Groups, Packing, arranged

GATES = {"": 0, "silu": 1, "clamped": 2}  # in the order of `enum Gate`


def takes(spec: Spec) -> str | None:
    """Say why the processor's kernels do not compute a GEMM; None: they do."""
    if spec.packing is None or spec.packing.layout not in (LAYOUT, ROWS):
        return "takes weights in tiles"
    if spec.x != torch.float32 or spec.out != torch.float32:
        return "takes rows of fp32"
    if spec.scales:
        return "takes no scales of columns"
    if spec.norm == "layer norm":
        return "has no layer norms"
    if spec.gate and spec.packing.layout == ROWS:
        return "takes no gate of weights by row"
    if spec.gate and (spec.gate != "silu" or spec.residual or spec.outputs % (2 * TILE)):
        return f"gates by silu, multiples of {TILE} outputs, without a sum"
    return None


@functools.lru_cache(maxsize=4096)
def _product(
    packing: Packing,
    weights: tuple[int | None, int | None, int | None],
    around: tuple[int | None, int | None, float, bool, int],
    rows: int,
) -> "ctypes._Pointer[Product]":
    """Return a GEMM of what lies at these addresses: codes, scales, minimums; norm, bias."""
    zero = 0.0 if packing.has_zeros else -float(MIDDLE.get(packing.bits, 0))
    is_e2m1 = packing.code_type == "e2m1"
    if is_e2m1:
        zero = -FLOAT_MIDDLE
    halves = packing.scale == torch.float16
    sizes = (packing.bits, packing.group, packing.outputs, packing.inputs)
    norm, bias, eps, plus_one, gate = around
    of = Weights(*weights, *sizes, halves, zero, rows, packing.layout == ROWS, is_e2m1)
    return ctypes.pointer(Product(of, norm, bias, eps, float(plus_one), gate, 0))


def product_of(values: Tensor, groups: Groups, around: Around) -> "ctypes._Pointer[Product]":
    """Return the structure of a GEMM with its norm, bias and gate; tensors must stay alive."""
    where = values.data_ptr(), address(groups.scales), address(groups.minimums)
    stages = address(around.norm), address(around.bias), around.eps, around.plus_one
    return _product(groups.packing, where, (*stages, GATES[around.gate]), row_bits())


@gemm.implementation("C++", "cpu", takes=takes)
def packed(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` of rows of fp32 with packed weights."""
    groups = around.groups
    assert groups is not None, "weights are packed"
    if groups.order is not None or groups.factors is not None:
        if around.norm is not None:
            x = rms_norm(x, around.norm, around.eps, around.plus_one)
            around = around._replace(norm=None)
        x = arranged(x, groups)
    if x.stride(1) != 1:
        x = x.contiguous()
    width = groups.packing.outputs // (2 if around.gate else 1)
    y = around.residual
    if y is None:
        y = torch.empty(len(x), width, dtype=x.dtype)
    if len(x):
        of = product_of(weight, groups, around)
        adds = around.residual is not None
        sizes = x.stride(0), len(x), y.data_ptr(), y.stride(0), adds, num_threads()
        loaded().product(of, x.data_ptr(), *sizes)
    return y
