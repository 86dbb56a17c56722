"""Products of one or two rows with a weight matrix, as fast as the matrix can be read (sm_90).

What stands around a product in a block is part of it: the norm of its input, bias, scales of 8-bit
weights, `silu(gate) * up`, the residual sum. Weights lie as in the checkpoint.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

MAX_ROWS = 2
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16)
THREADS = 256  # that multiply
PIECE = 8  # weights that a thread takes at once
CHUNKS = (1, 2, 4, 7, 14)
MAX_CHUNKS = {1: 14, 2: 7}  # by rows: what registers can hold of x
MAX_SLOTS = 16
SLOT_BYTES = 32 << 10
# Dynamic shared memory of a CTA when so many fill a multiprocessor: at most and at least. One more
# must not fit: CTAs of a kernel that starts late would crowd on the multiprocessors free first.
RING_BYTES = {1: 200 << 10, 2: 104 << 10}
MIN_BYTES = {1: 110 << 10, 2: 78 << 10}


@op("x[n,k]:T, weight[_,k]:W")
def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`x W^T`, accumulated in fp32 and rounded once; `[n, m]`, `[n, m / 2]` if `gated`.

    With `norm`, of `rms_norm(x)`. `scales [m] f32` belong to the rows of an e4m3 `weight`. `gated`
    makes `silu(gate) * up` of `[gate | up]`. With `residual`, that is what is changed and returned.
    """
    y = x.float()
    if norm is not None:
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    y = y @ weight.float().t()
    if scales is not None:
        y = y * scales
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    if residual is not None:
        return residual.copy_(residual + y)
    return y.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix streams through the shared memory of its CTAs."""

    rows: int  # of x
    chunks: int  # pieces of a weight row for each thread
    group: int  # weight rows multiplied at once
    slot_rows: int
    num_slots: int
    ctas: int = 1  # of a multiprocessor

    @property
    def is_packed(self) -> bool:
        """Whether registers hold x in 16 bits; it is not normalised then (PACKED in gemv.cu)."""
        return self.chunks > 7

    def bytes(self, row_bytes: int) -> int:
        """Of dynamic shared memory; no less than keeps another CTA out."""
        return max(self.num_slots * self.slot_rows * row_bytes, MIN_BYTES[self.ctas])


@functools.cache
def tiling(num_rows: int, width: int, row_bytes: int, gated: bool) -> Tiling | None:
    """For `num_rows` rows of x and weight rows of `width` elements; None where it does not fit."""
    chunks = next((c for c in CHUNKS if c * THREADS * PIECE >= width), None)
    if chunks is None or chunks > MAX_CHUNKS[num_rows]:
        return None
    is_fp8 = row_bytes == width
    group = 4 if chunks <= 2 else 2 if is_fp8 and (num_rows, chunks) == (1, 7) else 1
    step = max(group, 2 if gated else 1)
    # Measured: for one row, two CTAs a multiprocessor win 1 % wherever their rings are deep enough.
    in_pairs = num_rows == 1 and chunks in ((2,) if is_fp8 else (2, 7))
    for ctas in (2, 1) if in_pairs else (1,):
        slot_bytes = SLOT_BYTES // (2 if is_fp8 and ctas == 2 else 1)
        slot_rows = min(max(slot_bytes // row_bytes // step * step, step), THREADS // num_rows)
        num_slots = min(RING_BYTES[ctas] // (slot_rows * row_bytes), MAX_SLOTS)
        if num_slots > ctas:
            return Tiling(num_rows, chunks, group, slot_rows, num_slots, ctas)
    return None


def takes(x: Tensor, weight: Tensor, norm: Tensor | None = None, gated: bool = False) -> bool:
    """Whether the kernel is built for this product."""
    num_rows, width = x.shape
    row_bytes = width * weight.itemsize
    if not (1 <= num_rows <= MAX_ROWS and x.dtype in DTYPES and weight.dtype in (x.dtype, FP8)):
        return False
    if width % PIECE or row_bytes % 16 or weight.shape[0] % (2 if gated else 1):
        return False
    is_aligned = all(t.data_ptr() % 16 == 0 for t in (x, weight, norm) if t is not None)
    has_rows = x.stride(1) == 1 and (num_rows == 1 or x.stride(0) % PIECE == 0)
    if not (is_aligned and has_rows and weight.is_contiguous() and jit.is_hopper(x.device)):
        return False
    tiles = tiling(num_rows, width, row_bytes, gated)
    return tiles is not None and (norm is None or not tiles.is_packed)


def _variant(dtype: torch.dtype, fp8: bool, tiles: Tiling) -> jit.Variant:
    return jit.variant(
        "gemm/sm90/gemv.cu",
        dtype,
        only="sm_90a",
        FP8=int(fp8),
        ROWS=tiles.rows,
        CHUNKS=tiles.chunks,
        GROUP=tiles.group,
        CTAS=tiles.ctas,
    )


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    found: dict[jit.Variant, None] = {}
    for dtype, size, rows, chunks, gated in product(
        DTYPES, (1, 2), MAX_CHUNKS, CHUNKS, (False, True)
    ):
        width = chunks * THREADS * PIECE
        tiles = tiling(rows, width, width * size, gated)
        if tiles is not None:
            found[_variant(dtype, size == 1, tiles)] = None
    yield from found


@gemv.cuda
def _gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    num_rows, width = x.shape
    tiles = tiling(num_rows, width, width * weight.itemsize, gated)
    jit.require(
        tiles is not None and takes(x, weight, norm, gated),
        f"gemv: no kernel for {num_rows} rows of {width} {x.dtype} and weights {weight.dtype}",
    )
    assert tiles is not None
    return launch(tiles, x, weight, norm, eps, bias, scales, gated, residual)


def launch(
    tiles: Tiling,
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`gemv` on the GPU with tiles of choice."""
    num_rows, width = x.shape
    streams = 2 if gated else 1
    num_outputs = weight.shape[0] // streams
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    jit.require(out.stride(1) == 1, "gemv: elements of a row of the residual must be contiguous")
    pointers = (0 if t is None else t for t in (norm, bias, scales))
    num_ctas = min(tiles.ctas * jit.num_multiprocessors(x.get_device()), num_outputs)
    share = tiles.slot_rows // streams
    jit.launch(
        _variant(x.dtype, weight.dtype == FP8, tiles),
        "gemv",
        (num_ctas,),
        THREADS + 32,
        x,
        x.stride(0),
        weight,
        *pointers,
        out,
        out.stride(0),
        num_rows,
        num_outputs,
        width,
        streams,
        share,
        THREADS // (tiles.rows * tiles.slot_rows) * share,
        tiles.num_slots,
        *divmod(num_outputs, num_ctas),
        int(residual is not None),
        eps,
        1.0 / width,
        shared_memory=tiles.bytes(width * weight.itemsize),
        overlaps=True,
    )
    return out
