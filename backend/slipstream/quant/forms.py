"""Ways to multiply with quantised weights on a device; the first that takes them is used.

What none takes is dequantised as it is loaded, to the dtype of the model, and multiplied as weights
that were never quantised: that needs the memory of 16 or 32 bits, and rounds each weight once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise import fp8
from slipstream.kernels.gemm.op import Matrix
from slipstream.quant.matrix import Kind, QuantMatrix, codes_of

_GROUPS = (32, 64, 128, 256)  # of torch's product with 4 bits
_TILE = 32  # outputs of the same


class Packed(NamedTuple):
    """Weights as torch's GEMMs on a CPU take them."""

    form: str  # a name of `MULTIPLY`
    codes: Tensor
    scales: Tensor
    group: int


class Form(NamedTuple):
    """A way to multiply."""

    name: str
    takes: Callable[[QuantMatrix, torch.device, torch.dtype], bool]
    make: Callable[[QuantMatrix], Matrix | Packed]


def _is_exact(scales: Tensor) -> bool:
    """Whether scales are numbers of bfloat16, in which these GEMMs keep them."""
    return scales.is_meta or torch.equal(scales.bfloat16().float(), scales.float())


def _takes_int8(matrix: QuantMatrix, device: torch.device, dtype: torch.dtype) -> bool:
    by_row = matrix.group >= matrix.inputs and matrix.outer is None
    fits = matrix.kind is Kind.W8 and by_row and matrix.is_symmetric and matrix.is_plain
    is_here = device.type == "cpu" and dtype == torch.bfloat16  # fp32 is slower than its own
    return fits and is_here and _is_exact(matrix.scales)


def _make_int8(matrix: QuantMatrix) -> Packed:
    scales = matrix.scales[:, 0].to(torch.bfloat16).contiguous()
    return Packed("int8", matrix.codes.contiguous(), scales, matrix.inputs)


def _takes_int4(matrix: QuantMatrix, device: torch.device, dtype: torch.dtype) -> bool:
    whole = matrix.inputs % matrix.group == 0 and matrix.outputs % _TILE == 0
    fits = matrix.kind is Kind.W4 and matrix.group in _GROUPS and whole and matrix.outer is None
    fits = fits and matrix.is_symmetric and matrix.is_plain  # zeros would be rounded to bfloat16
    is_here = device.type == "cpu" and dtype == torch.bfloat16
    return fits and is_here and _is_exact(matrix.scales)


def _make_int4(matrix: QuantMatrix) -> Packed:
    codes = codes_of(matrix).to(torch.int32).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = matrix.scales.to(torch.bfloat16).T
    both = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    return Packed("int4", packed, both, matrix.group)


def _takes_fp8(matrix: QuantMatrix, device: torch.device, dtype: torch.dtype) -> bool:
    if matrix.kind is not Kind.F8 or device.type != "cuda" or dtype not in fp8.DTYPES:
        return False
    by_row = matrix.group >= matrix.inputs and matrix.is_symmetric and matrix.is_plain
    sizes = (matrix.inputs, matrix.outputs)
    fits = not any(size % fp8.MULTIPLE for size in sizes) and matrix.inputs <= fp8.MAX_WIDTH
    return by_row and fits and torch.cuda.get_device_capability(device) >= fp8.MIN_CAPABILITY


def _make_fp8(matrix: QuantMatrix) -> Matrix:
    scales = matrix.scales[:, 0].float()
    scales = scales if matrix.outer is None else scales * matrix.outer
    return Matrix(matrix.codes.contiguous(), scales.contiguous())


FORMS = (
    Form("e4m3 products, rows quantised by token", _takes_fp8, _make_fp8),
    Form("torch's product with 8 bits", _takes_int8, _make_int8),
    Form("torch's product with 4 bits", _takes_int4, _make_int4),
)


def form_of(matrix: QuantMatrix, device: torch.device, dtype: torch.dtype) -> Form | None:
    """Return the first form that takes weights on a device; None: they must be dequantised."""
    return next((form for form in FORMS if form.takes(matrix, device, dtype)), None)


def product(x: Tensor, weights: Packed) -> Tensor:
    """`x W^T` of bfloat16 rows on a CPU, `[n, m]`, summed in fp32 and rounded once."""
    if weights.form == "int8":
        return torch._weight_int8pack_mm(x, weights.codes, weights.scales)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, weights.codes, weights.group, weights.scales
    )
    return y
