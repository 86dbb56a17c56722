"""RMS normalisation (Zhang and Sennrich, 2019)."""

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


def _variant(dtype: torch.dtype, vector: int, threads: int) -> jit.Variant:
    rows = 4 if threads == 32 else 1
    return jit.variant("norm.cu", dtype, VECTOR=vector, THREADS=threads, ROWS=rows)


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    for dtype in jit.DTYPES:
        for vector in (1, 16 // dtype.itemsize):
            for threads in (32, 256):
                yield _variant(dtype, vector, threads)


@rms_norm.cuda
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A warp a row up to 64 accesses, else 256 threads."""
    jit.type_name(x.dtype)
    jit.require(
        all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (x, weight)),
        "rms_norm: elements of a row must be contiguous",
    )
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    vector = jit.vector_width(width, x, weight)
    rows = 4 if width <= 64 * vector else 1
    wanted = _variant(x.dtype, vector, 32 if rows > 1 else 256)
    grid, threads = (-(-num_rows // rows),), 32 * rows if rows > 1 else 256
    args = (x, x.stride(0), weight, out, num_rows, width, eps)
    jit.launch(wanted, "rms_norm", grid, threads, *args)
    return out
