"""RMS normalisation (Zhang and Sennrich, 2019)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op


class RmsNorm(NamedTuple):
    """An RMS norm: what `rms_norm` takes beside rows."""

    weight: Tensor  # [d]
    eps: float
    plus_one: bool = False


@op("x[n,d]:T, weight[d]:T")
def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """`x / rms(x) * weight`, accumulated in fp32 and rounded once. Rows of `x` may be strided.

    With `plus_one` the weight is `1 + weight`, in fp32 (Gemma).
    """
    x32, factor = x.float(), weight.float()
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * rstd * (1 + factor if plus_one else factor)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al., 2016) of rows `[n, size]`, by torch: in fp32, rounded once."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _variant(
    dtype: torch.dtype, vector: int, threads: int, packs: int, plus_one: bool
) -> jit.Variant:
    return jit.variant(
        "elementwise/norm.cu",
        dtype,
        VECTOR=vector,
        THREADS=threads,
        ROWS=4 if threads == 32 else 1,
        PACKS=packs,
        PLUS_ONE=int(plus_one),
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in jit.DTYPES:
        for vector in (1, 16 // dtype.itemsize):
            for threads, packs in ((32, 2), (256, 2), (256, 8)):
                for plus_one in (False, True):
                    yield _variant(dtype, vector, threads, packs, plus_one)


@rms_norm.cuda
def _rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
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
    threads = 32 if width <= 64 * vector else 256
    packs = 2 if width <= 2 * threads * vector else 8
    rows = 4 if threads == 32 else 1
    args = (x, x.stride(0), weight, out, num_rows, width, eps)
    wanted = _variant(x.dtype, vector, threads, packs, plus_one)
    grid = (-(-num_rows // rows),)
    jit.launch(wanted, "rms_norm", grid, threads * rows, *args, overlaps=True)
    return out
