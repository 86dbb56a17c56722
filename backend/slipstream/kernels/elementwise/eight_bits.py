"""Matrices of 8 bits, an fp32 scale a row; scaling of their GEMMs.

The types are e4m3 (Micikevicius et al., 2022) and int8. A token's scale is its largest absolute
value over the largest number of the type, 448 or 127; so nothing overflows, zeros stay zeros, and
NaN or infinity makes the row's every product NaN: by values of e4m3, by the scale of int8. An
output's, of weights, is searched where they are loaded (`quant/rounding.py`). A product of e4m3 is
rounded to bfloat16 unscaled, one of int8 is the exact sum in int32. Its reader multiplies by the
scales of its row and its column, and adds the column's bias if any; the skinny and the tall GEMM do
that themselves if they are given them.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.scales import Scales, scaled
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
# Values -> what a GEMM of them is in before it is scaled.
PRODUCTS: dict[torch.dtype, torch.dtype] = {E4M3: torch.bfloat16, INT8: torch.int32}
MIN_CAPABILITY = (8, 9)  # conversions and GEMMs of e4m3
DTYPES = (torch.float16, torch.bfloat16)  # that have kernels
MULTIPLE = 16  # a GEMM needs both sides of the weights to be multiples of it
ROW_MULTIPLE = 4  # rows that a GEMM may read at once, those behind the last one too
MAX_WIDTH = 32_768  # elements of a row that a CTA can hold

_LARGEST = {E4M3: 448.0, INT8: 127.0}
_SMALLEST = 1e-30  # what a row's largest value counts as at least: 448 / it is finite
_VECTOR = 8  # elements of an access
_MAX_THREADS = 1024
_SHARING_THREADS = 448  # of a CTA that leaves half a multiprocessor to another
_ELEMENTWISE_THREADS = 256
_FEW_ROWS = 132  # about as many as there are multiprocessors


class Quantized(NamedTuple):
    """`values * scales[:, None]`."""

    values: Tensor  # [n, k] e4m3 or i8
    scales: Tensor  # [n] f32


def values_of(product: torch.dtype) -> torch.dtype:
    """Return the type of values of which a GEMM is in a dtype."""
    return next(values for values, each in PRODUCTS.items() if each == product)


# ---- oracles ----


def _quantized(values: Tensor, dtype: torch.dtype) -> Quantized:
    most = _LARGEST[dtype]
    largest = values.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    # A number divided by a tensor would be multiplied by reciprocals, which round differently.
    inverse = torch.full_like(largest, most) / largest
    scaled, scales = (values * inverse).clamp(-most, most), largest / most
    if dtype == INT8:  # which has no NaN, and no infinity
        scaled = scaled.round().nan_to_num(0.0)
        scales = scales + (largest - largest)
    return Quantized(scaled.to(dtype), scales.squeeze(-1))


@op("x[n,k]:T")
def quantize(x: Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    """Quantise the rows of `x` as they are; those of int8 to the nearest, of two to the even."""
    return _quantized(x.float(), dtype)


@op("x[n,k]:T, order[p]:i32")
def gather_quantize(x: Tensor, order: Tensor, share: int, dtype: torch.dtype = E4M3) -> Quantized:
    """Quantise row `order[i] // share` of `x` for each i, as `quantize` does; `[p, k]`.

    The kernel that follows may read the order, and all that was made before it, ere it waits.
    """
    return _quantized(x[order.long() // share].float(), dtype)


@op("x[n,k]:T, norm[k]:T")
def norm_quantize(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype = E4M3) -> Quantized:
    """`rms_norm(x)`: `x * norm` is rounded, its row's `1 / rms` goes into the scale."""
    x32 = x.float()
    values, scales = _quantized(x32 * norm.float(), dtype)
    return Quantized(values, scales * torch.rsqrt(x32.pow(2).mean(-1) + eps))


@op("x[n,k]:T, norm[k]:T, product[n,k]:P, rows[n]:f32, columns[k]:f32")
def add_norm_quantize(
    x: Tensor,
    norm: Tensor,
    product: Tensor,
    rows: Tensor,
    columns: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Quantized:
    """`x += ` the scaled product, in place and rounded; then `norm_quantize(x)` to its type."""
    add_scaled.oracle(x, product, rows, columns, bias)
    return norm_quantize.oracle(x, norm, eps, values_of(product.dtype))


@op("product[n,m]:P, rows[n]:f32, columns[m]:f32")
def silu_mul_quantize(
    product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None = None
) -> Quantized:
    """`silu(gate) * up` of the scaled product `[gate | up]`, to its type; `[n, m / 2]`."""
    gate, up = scaled(product, rows, columns, bias).chunk(2, dim=-1)
    return _quantized(functional.silu(gate) * up, values_of(product.dtype))


@op("x[n,m]:T, product[n,m]:P, rows[n]:f32, columns[m]:f32")
def add_scaled(
    x: Tensor, product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None = None
) -> None:
    """`x += ` the scaled product, in place, rounded once."""
    x.copy_(x.float() + scaled(product, rows, columns, bias))


@op("product[n,m]:P, rows[n]:f32, columns[m]:f32")
def scale(
    product: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The scaled product in `dtype`, rounded once."""
    return scaled(product, rows, columns, bias).to(dtype)


class Unscaled(NamedTuple):
    """A product without its scales and bias: its reader applies them and what follows."""

    product: Tensor  # [n, m] bf16 or i32
    scales: Scales

    @property
    def values(self) -> torch.dtype:
        """Name the type of values that were multiplied."""
        return values_of(self.product.dtype)

    def finish(self, dtype: torch.dtype) -> Tensor:
        """Return the scaled product in `dtype`."""
        rows, columns, bias = self.scales
        return scale(self.product, rows, columns, dtype, bias)

    def add_to(self, values: Tensor) -> None:
        """Add the scaled product to `values [n, m]`, in place."""
        add_scaled(values, self.product, *self.scales)


# ---- on a GPU ----


def _variant(dtype: torch.dtype, packs: int, values: torch.dtype) -> jit.Variant:
    if values == INT8:
        return jit.variant("elementwise/eight_bits.cu", dtype, INT8=1, PACKS=packs)
    # The conversions are in every architecture from sm_89 on.
    return jit.variant("elementwise/eight_bits.cu", dtype, only="sm_90a", PACKS=packs)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype, packs, values in itertools.product(DTYPES, (1, 2, 4, 8), PRODUCTS):
        yield _variant(dtype, packs, values)


def _require(name: str, width: int, dtype: torch.dtype, *tensors: Tensor | None) -> None:
    jit.require(dtype in DTYPES, "{}: no kernels for {}", name, dtype)
    is_whole = width % _VECTOR == 0
    jit.require(is_whole, "{}: rows of {}, which is no multiple of {}", name, width, _VECTOR)
    jit.require(
        all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in tensors),
        "{}: tensors must be contiguous and aligned to 16 bytes",
        name,
    )


def _values_of(name: str, product: Tensor) -> torch.dtype:
    """Return the type of values of a product that has kernels."""
    is_known = product.dtype in PRODUCTS.values()
    jit.require(is_known, "{}: no kernels for products in {}", name, product.dtype)
    return values_of(product.dtype)


def _empty(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Quantized:
    """Rows to be written; behind the values is memory for a whole number of `ROW_MULTIPLE` rows."""
    jit.require(dtype in PRODUCTS, "quantize: no kernels to {}", dtype)
    rows, width = shape
    whole = (-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, width)
    return Quantized(
        torch.empty(whole, dtype=dtype, device=device)[:rows],
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def _packs(accesses: int, num_rows: int) -> int:
    """Count a thread's accesses; with 4, two CTAs that hold a long row fit a multiprocessor."""
    if accesses <= _MAX_THREADS:
        return 1
    if num_rows > _FEW_ROWS and accesses <= 4 * _SHARING_THREADS:
        return 4
    return 2 if accesses <= 2 * _MAX_THREADS else 8


def _launch_rows(entry: str, out: Quantized, dtype: torch.dtype, *args: jit.Argument) -> Quantized:
    """Start `entry`, whose CTAs each make a row of `out`."""
    num_rows, width = out.values.shape
    jit.require(width <= MAX_WIDTH, "{}: rows of {}, above {}", entry, width, MAX_WIDTH)
    if out.values.numel() > 0:
        accesses = width // _VECTOR
        packs = _packs(accesses, num_rows)
        threads = 32 * -(-accesses // (32 * packs))
        wanted = _variant(dtype, packs, out.values.dtype)
        jit.launch(wanted, entry, (num_rows,), threads, *args, overlaps=True)
    return out


@quantize.cuda
def _quantize(x: Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    _require("quantize", x.shape[1], x.dtype, x)
    out = _empty(x.shape, x.device, dtype)
    return _launch_rows("quantize", out, x.dtype, x, *out, x.shape[1])


@gather_quantize.cuda
def _gather_quantize(x: Tensor, order: Tensor, share: int, dtype: torch.dtype = E4M3) -> Quantized:
    width = x.shape[1]
    _require("gather_quantize", width, x.dtype, order)
    jit.require(jit.vector_width(width, x) == _VECTOR, "gather_quantize: rows are not aligned")
    out = _empty((len(order), width), x.device, dtype)
    given = (x, x.stride(0), order, share)
    return _launch_rows("gather_quantize", out, x.dtype, *given, *out, width)


@norm_quantize.cuda
def _norm_quantize(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype = E4M3) -> Quantized:
    _require("norm_quantize", x.shape[1], x.dtype, x, norm)
    out = _empty(x.shape, x.device, dtype)
    return _launch_rows("norm_quantize", out, x.dtype, x, norm, *out, x.shape[1], eps)


@add_norm_quantize.cuda
def _add_norm_quantize(
    x: Tensor,
    norm: Tensor,
    product: Tensor,
    rows: Tensor,
    columns: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Quantized:
    entry = "add_norm_quantize"
    _require(entry, x.shape[1], x.dtype, x, norm, product, columns, bias)
    out = _empty(x.shape, x.device, _values_of(entry, product))
    args = (x, norm, product, rows, columns, bias)
    return _launch_rows(entry, out, x.dtype, *args, *out, x.shape[1], eps)


@silu_mul_quantize.cuda
def _silu_mul_quantize(
    product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None = None
) -> Quantized:
    entry = "silu_mul_quantize"
    num_rows, width = product.shape[0], product.shape[1] // 2
    jit.require(product.shape[1] % 2 == 0, "{}: width {} is odd", entry, product.shape[1])
    dtype = torch.bfloat16 if bias is None else bias.dtype
    _require(entry, width, dtype, product, columns, bias)
    out = _empty((num_rows, width), product.device, _values_of(entry, product))
    args = (product, rows, columns, bias)
    return _launch_rows(entry, out, dtype, *args, *out, width)


def _launch_elements(
    entry: str, out: Tensor, product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None
) -> None:
    num_rows, width = out.shape
    _require(entry, width, out.dtype, out, product, columns, bias)
    if out.numel() == 0:
        return
    grid = (num_rows, -(-width // (_ELEMENTWISE_THREADS * _VECTOR)))
    args = (out, product, rows, columns, bias, width)
    wanted = _variant(out.dtype, 1, _values_of(entry, product))
    jit.launch(wanted, entry, grid, _ELEMENTWISE_THREADS, *args, overlaps=True)


@add_scaled.cuda
def _add_scaled(
    x: Tensor, product: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None = None
) -> None:
    _launch_elements("add_scaled", x, product, rows, columns, bias)


@scale.cuda
def _scale(
    product: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    _launch_elements("scale", out, product, rows, columns, bias)
    return out
