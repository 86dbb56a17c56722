"""GEMMs of many rows: cuBLASLt's kernels, chosen by us.

The kernel of a shape is the one that `slipstream tune` measured as the fastest (`tuning.py`);
without a measurement, cuBLASLt's own first guess among those that do not split the sum of an
element. Splitting it costs a second kernel, and bits that depend on how many rows there are.
"""

import functools
import logging
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.eight_bits import E4M3, INT8, PRODUCTS
from slipstream.kernels.gemm import tuning
from slipstream.kernels.gemm.cublaslt_api import (
    WORKSPACE,
    Algorithm,
    GemmShape,
    MatmulPlan,
    Problem,
)
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError, op

DTYPES = (torch.float16, torch.bfloat16, E4M3, INT8)
_INT8_MULTIPLE = 4  # of inputs and outputs
_INT8_ROWS = 32  # fewer are multiplied as so many: kernels for 16 and fewer are missing
_WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")
_ALIGNED = 16  # bytes; all that a kernel asks for
_log = logging.getLogger(__name__)
PLANS: list["functools._lru_cache_wrapper[Any]"] = []  # that rest on measured choices
# Any number of rows of a budget of 8,192, of 8 matrices: 3.5 kB of the host each. A search for one
# that was evicted delays a step.
MOST_PLANS = 8192 * 8


@op("x[n,k]:T, weight[m,k]:T")
def matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x W^T`, `[n, m]`, summed in fp32 and rounded once; rows of every matrix may be strided.

    Sums of int8 are exact, in int32.

    On a GPU, sums of e4m3 have fewer bits on the way, for speed. Terms of either sign lose next to
    nothing by that; thousands of one sign some percent of their sum (4 to 9 of 4096 squares).

    Args:
        x: fp32, fp16, bf16, e4m3 or int8; scales of these two are the caller's.
        weight: like `x`.
        out: where it goes; made here if None.
        accumulate: add to what is in `out`, in fp32, before rounding.
        dtype: of an `out` made here; that of `x`, bf16 for e4m3, i32 for int8, if None.

    Raises KernelError, with the shape, for what cuBLASLt cannot do.
    """
    out = _out(x, weight, dtype, accumulate) if out is None else out
    wide = torch.float64 if x.dtype == INT8 else torch.float32
    product = functional.linear(x.to(wide), weight.to(wide))
    return out.copy_(product + out.to(wide) if accumulate else product)


@matmul.cuda
def _matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = _out(x, weight, dtype, accumulate) if out is None else out
    if out.numel() == 0:
        return out
    if x.dtype == torch.float32:  # torch knows whether the operator allows tf32
        return torch.addmm(out, x, weight.t(), beta=int(accumulate), out=out)
    if x.dtype == INT8 and len(x) < _INT8_ROWS and not accumulate:
        more = x.new_zeros((_INT8_ROWS, x.shape[1]))
        more[: len(x)] = x
        return out.copy_(_matmul(more, weight)[: len(x)])
    plan = plan_of(x, weight, out, accumulate)
    stream = torch.cuda.current_stream(x.get_device()).cuda_stream
    plan.launch(x.data_ptr(), weight.data_ptr(), out.data_ptr(), stream)
    return out


def rows_of(dtype: torch.dtype, rows: int) -> int:
    """Return the rows that are multiplied for so many of x in a dtype."""
    return max(rows, _INT8_ROWS) if dtype == INT8 else rows


def _out(x: Tensor, weight: Tensor, dtype: torch.dtype | None, accumulate: bool) -> Tensor:
    jit.require(not accumulate, "matmul: there is no `out` to add to")
    if dtype is None:
        dtype = PRODUCTS.get(x.dtype, x.dtype)
    return torch.empty((len(x), len(weight)), dtype=dtype, device=x.device)


def takes(spec: Spec) -> str | None:
    """Say why cuBLASLt does not compute a product with what is around it; None: it does."""
    if spec.weight != spec.x:
        return "takes rows and weights of one type"
    if spec.norm or spec.gate:
        return "has no norms and gates"
    if spec.scales:
        return "has no scales"
    if spec.x == E4M3 and spec.target.architecture in _WITHOUT_E4M3:
        return f"has no e4m3 on {spec.target.architecture}"
    if spec.x in PRODUCTS and (spec.bias or spec.residual):
        return "adds nothing to what has no scales yet"
    if spec.x == INT8 and (spec.inputs % _INT8_MULTIPLE or spec.outputs % _INT8_MULTIPLE):
        return f"takes multiples of {_INT8_MULTIPLE} inputs and outputs of int8"
    return None


@gemm.implementation("cublaslt", "cuda", takes=takes, cost=2)
def cublaslt(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on any GPU: a product, added to biases or the residual sum."""
    bias, residual = around.bias, around.residual
    if residual is not None:
        if bias is not None:
            residual += bias
        return matmul(x, weight, residual, accumulate=True)
    if bias is None:
        return matmul(x, weight)
    return matmul(x, weight, bias.repeat(len(x), 1), accumulate=True)


# ---- plans ----


def plan_of(x: Tensor, weight: Tensor, out: Tensor, accumulate: bool = False) -> MatmulPlan:
    """Return the plan of a GEMM whose tensors lie in memory like these; made once."""
    device = torch.cuda.current_device()
    if not x.get_device() == out.get_device() == device:
        where = f"x is on {x.device}, out on {out.device}"
        raise KernelError(f"matmul: {where}, not both on cuda:{device}")
    bits = x.data_ptr() | weight.data_ptr() | out.data_ptr() | _ALIGNED
    return _plan(
        *(x.shape, len(weight), out.shape, x.dtype, out.dtype),
        *(x.stride(), weight.stride(), out.stride(), bits & -bits, accumulate, device),
    )


@functools.lru_cache(maxsize=MOST_PLANS)
def _plan(
    x_shape: tuple[int, ...],
    outputs: int,
    out_shape: tuple[int, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    x_strides: tuple[int, ...],
    weight_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    alignment: int,
    accumulate: bool,
    device: int,
) -> MatmulPlan:
    rows, inputs = x_shape
    jit.require(dtype in DTYPES, f"matmul: {dtype} has no kernels")
    jit.require(
        tuple(out_shape) == (rows, outputs), f"matmul: out is {[*out_shape]}, not {[rows, outputs]}"
    )
    strides = (
        _row_stride("x", rows, inputs, x_strides),
        _row_stride("weight", outputs, inputs, weight_strides),
        _row_stride("out", rows, outputs, out_strides),
    )
    shape = GemmShape(rows, inputs, outputs, dtype, out_dtype, strides, alignment, accumulate)
    problem = Problem(shape, device)
    return MatmulPlan(problem, tuned(problem) or default(problem))


PLANS.append(_plan)


def _row_stride(name: str, rows: int, width: int, strides: tuple[int, ...]) -> int:
    """Elements from a row to the next; a single row, or column, may have any strides."""
    jit.require(
        strides[1] == 1 or width == 1, f"matmul: elements of a row of {name} must be contiguous"
    )
    if rows == 1:
        return width
    jit.require(strides[0] >= width, f"matmul: rows of {name} overlap")
    return strides[0]


def default(problem: Problem) -> Algorithm:
    """cuBLASLt's own choice, without splitting the sum wherever that is possible."""
    for workspace in (0, WORKSPACE):
        for algorithm in problem.heuristics(workspace, 1):
            return algorithm
    raise KernelError(f"{problem.shape}: cuBLASLt has no kernel for it")


def tuned(problem: Problem) -> Algorithm | None:
    """Return the measured choice, if there is one and it can do this very layout."""
    shape = problem.shape
    sizes = (shape.dtype.itemsize, shape.dtype.itemsize, shape.out_dtype.itemsize)
    strides = (stride * size for stride, size in zip(shape.strides, sizes, strict=True))
    if shape.alignment < _ALIGNED or any(stride % _ALIGNED for stride in strides):
        return None
    product, choices = tuning.Product.of(shape), tuning.choices(problem.device)
    blob = choices.find(product, shape.rows)
    if blob is None and product.adds:  # to biases, which are not measured
        blob = choices.find(msgspec.structs.replace(product, adds=False), shape.rows)
    algorithm = None if blob is None else problem.algorithm_of(blob)
    if blob is not None and algorithm is None:
        _log.warning("%s: the tuned kernel cannot do it: tune again", shape)
    return algorithm


def discard_plans() -> None:
    """Make plans anew: the choices on disk have changed."""
    for plans in PLANS:
        plans.cache_clear()
    tuning.choices.cache_clear()
