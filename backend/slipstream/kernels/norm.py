"""RMS normalisation (Zhang and Sennrich, 2019), alone and with the residual sum before it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels import jit
from slipstream.kernels.op import op


@op("x[n,d]:T, weight[d]:T")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`, accumulated in fp32 and rounded once. Rows of `x` may be strided."""
    x32 = x.float()
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * rstd * weight.float()).to(x.dtype)


@op("x[n,d]:T, residual[n,d]:T, weight[d]:T")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place (rounded to its dtype), then `rms_norm(residual)`."""
    residual += x
    return rms_norm.reference(residual, weight, eps)


def _variant(dtype: torch.dtype, vector: int, threads: int) -> jit.Variant:
    rows = 4 if threads == 32 else 1
    return jit.variant("norm.cu", dtype, VECTOR=vector, THREADS=threads, ROWS=rows)


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    for dtype in jit.DTYPES:
        for vector in (1, 16 // dtype.itemsize):
            for threads in (32, 256):
                yield _variant(dtype, vector, threads)


def _launch(entry: str, tensors: tuple[Tensor, ...], weight: Tensor, eps: float) -> Tensor:
    """Normalise the last of `tensors`; a warp a row up to 64 accesses, else 256 threads."""
    x = tensors[-1]
    jit.type_name(x.dtype)
    jit.require(
        all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (*tensors, weight)),
        f"{entry}: elements of a row must be contiguous",
    )
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    vector = jit.vector_width(width, *tensors, weight)
    wanted = _variant(x.dtype, vector, 32 if width <= 64 * vector else 256)
    rows = 4 if width <= 64 * vector else 1
    strided = [arg for t in tensors for arg in (t, t.stride(0))]
    threads = 32 * rows if rows > 1 else 256
    grid = (-(-num_rows // rows),)
    jit.launch(wanted, entry, grid, threads, *strided, weight, out, num_rows, width, eps)
    return out


@rms_norm.cuda
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch("rms_norm", (x,), weight, eps)


@add_rms_norm.cuda
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch("add_rms_norm", (x, residual), weight, eps)
