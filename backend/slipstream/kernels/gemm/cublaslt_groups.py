"""GEMMs of e4m3 whose weights have a scale for each 128 inputs of a row: cuBLASLt's, on Hopper.

cuBLASLt (12.9 on) scales sums of 128 inputs in fp32. It asks for scales of x, too; these are ones:
a row's own scale is left to the reader of the product. It takes multiples of 4 rows; rows that are
not there may hold anything, as no row reads another.
"""

import functools
import logging

import torch
from slipstream_runtime.once import warn_once
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.eight_bits import E4M3, ROW_MULTIPLE
from slipstream.kernels.elementwise.scales import ones
from slipstream.kernels.gemm import cublaslt, cublaslt_api
from slipstream.kernels.gemm.cublaslt_api import Algorithm, GemmShape, MatmulPlan, Problem
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import KernelError, op
from slipstream.kernels.runtime.registry import Target, target_of

GROUP = 128  # inputs; of blocks, rows of x, too
MULTIPLE = 16  # of inputs and outputs
MIN_VERSION = 120_900
X_SCALES: tuple[str, ...] = ("blocks", "rows")  # the first for which there is a kernel
_ALIGNED = 16  # bytes
_log = logging.getLogger(__name__)


@op("x[n,k]:e4m3, weight[m,k]:e4m3, scales[_,m]:f32")
def matmul_by_groups(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`x W^T`, `[n, m]` bf16, rounded once.

    Args:
        x: values.
        weight: values.
        scales: `[ceil(k / 128), m]`, of the weights.
    """
    sums = x.new_zeros((len(x), len(weight)), dtype=torch.float32)
    for group, scale in enumerate(scales):
        part = slice(group * GROUP, (group + 1) * GROUP)
        sums += functional.linear(x[:, part].float(), weight[:, part].float()) * scale
    return sums.to(torch.bfloat16)


@matmul_by_groups.cuda
def _matmul_by_groups(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    num_rows, (outputs, inputs) = len(x), weight.shape
    rows = padded(num_rows)
    plan = plan_of(rows, inputs, outputs, torch.cuda.current_device())
    jit.require(plan is not None, "matmul_by_groups: no kernel for {} rows", rows)
    assert plan is not None
    x = _with_memory(x, rows)
    out = torch.empty((rows, outputs), dtype=torch.bfloat16, device=x.device)
    of_x = ones(_num_x_scales(plan.shape), x.device)
    given = (x, weight, out, scales, of_x)
    is_aligned = all(each.data_ptr() % _ALIGNED == 0 for each in given)
    jit.require(is_aligned, "matmul_by_groups: tensors must be aligned to 16 bytes")
    stream = torch.cuda.current_stream(x.get_device()).cuda_stream
    of_weight = scales.data_ptr()
    plan.launch_by_groups(
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), stream), of_weight, of_x.data_ptr()
    )
    return out[:num_rows]


def padded(rows: int) -> int:
    """Return the rows that a GEMM computes for so many."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _with_memory(x: Tensor, rows: int) -> Tensor:
    """Return `x` in one piece, with memory of so many rows: where it has that already, as it is."""
    behind = x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize
    if x.is_contiguous() and behind >= rows * x.shape[1] * x.itemsize:
        return x
    longer = x.new_empty((rows, x.shape[1]))
    longer[: len(x)].copy_(x)
    return longer


def _num_x_scales(shape: GemmShape) -> int:
    groups = -(-shape.inputs // GROUP)
    if shape.x_scales == "rows":
        return groups * shape.rows
    return -(-groups // 4) * 4 * -(-shape.rows // GROUP)


def refusal(rows: int, inputs: int, outputs: int, target: Target) -> str | None:
    """Say why cuBLASLt does not compute such a GEMM on a Hopper; None: it does.

    This machine's library answers; that of another is taken to be new.
    """
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return f"takes multiples of {MULTIPLE} inputs and outputs"
    if not _is_here(target):
        return None
    version = cublaslt_api.version()
    if version < MIN_VERSION:
        return f"needs version {MIN_VERSION} of cuBLASLt, not {version}"
    device = torch.cuda.current_device()
    is_there = plan_of(padded(rows), inputs, outputs, device) is not None
    return None if is_there else "finds no kernel in cuBLASLt"


def _is_here(target: Target) -> bool:
    if not torch.cuda.is_available():
        return False
    return target_of(torch.device("cuda", torch.cuda.current_device())) == target


@functools.lru_cache(maxsize=cublaslt.MOST_PLANS // ROW_MULTIPLE)
def plan_of(rows: int, inputs: int, outputs: int, device: int) -> MatmulPlan | None:
    """Return the plan of a GEMM, by the kernel that was measured, else without splitting sums
    wherever that is possible; None: there is no kernel.
    """
    strides = (inputs, inputs, outputs)
    for x_scales in X_SCALES:
        shape = GemmShape(
            *(rows, inputs, outputs, E4M3, torch.bfloat16, strides, _ALIGNED, False, x_scales)
        )
        try:
            problem = Problem(shape, device)
            if (algorithm := _algorithm(problem)) is not None:
                return MatmulPlan(problem, algorithm)
        except KernelError as error:  # it answers so, too, to what it does not know
            line = f"GEMMs by groups, x scaled by {x_scales}: {error}"
            warn_once(_log, line, ("groups", inputs, outputs, x_scales))
    return None


cublaslt.PLANS.append(plan_of)


def _algorithm(problem: Problem) -> Algorithm | None:
    for workspace in (0, cublaslt_api.WORKSPACE):
        for algorithm in problem.heuristics(workspace, 1):
            return cublaslt.tuned(problem) or algorithm
    return None


def measurable(shape: GemmShape, device: int) -> Problem:
    """Describe a GEMM that is launched without scales of its own; those by groups read ones."""
    problem = Problem(shape, device)
    if shape.x_scales:
        place = torch.device("cuda", device)
        of_weight = ones(-(-shape.inputs // GROUP) * shape.outputs, place)
        of_x = ones(_num_x_scales(shape), place)
        problem.set_scales(of_weight.data_ptr(), of_x.data_ptr())
    return problem
