"""Products of up to 16 rows with a weight matrix on Hopper's tensor cores (sm_90a), memory-bound.

A tile of weight rows belongs to a cluster of CTAs that share out the width, or to one CTA where
there are rows enough for all.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import jit, tensor_map
from slipstream.kernels.gemv import gemv
from slipstream.kernels.op import op

MAX_ROWS = 16
DTYPES = (torch.float16, torch.bfloat16)
COLUMNS = (8, 16)  # rows of x, rounded up
CLUSTERS = (1, 4)
STEP = 64  # elements of the width; 128 bytes
ROW_BYTES = 128
TILE_ROWS = 256
BLOCK_ROWS = 64
THREADS = 256 + 64
MAX_SLOTS = 16
MEMORY = 208 << 10  # of a CTA, so that those of small kernels have room beside it
MIN_MEMORY = 120 << 10  # above half of a multiprocessor's: two CTAs never share one


@op("x[n,k]:T, weight[_,k]:T")
def skinny(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`x W^T + b`, accumulated in fp32 and rounded once; `[n, m]`, `[n, m / 2]` if `gated`.

    `gated` makes `silu(gate) * up` of `[gate | up]`. With `residual`, that is what is changed and
    returned.
    """
    return gemv.reference(x, weight, bias=bias, gated=gated, residual=residual)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix is shared out. A tile has `share` outputs, whose gates precede their ups."""

    columns: int
    cluster: int
    share: int
    num_slots: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        used = self.num_slots * (self.slot_bytes + 16) + 16 + _sum_bytes(self.columns)
        # The last slot's tile is multiplied as if it had all rows.
        last = (self.num_slots - 1) * self.slot_bytes + TILE_ROWS * ROW_BYTES
        return max(used, last, MIN_MEMORY)


def _sum_bytes(columns: int) -> int:
    """Of a tile's sums, as its outputs are finished."""
    return TILE_ROWS * (columns + 2) * 4


@functools.cache
def tiling(
    num_rows: int, num_outputs: int, gated: bool, multiprocessors: int, cluster: int = 0
) -> Tiling:
    """For `num_rows` rows of x; `num_outputs` is of the result. A `cluster` of 0: a good one."""
    streams = 2 if gated else 1
    columns = next(c for c in COLUMNS if c >= num_rows)
    if cluster == 0:
        cluster = 1 if num_outputs * streams > TILE_ROWS // 2 * multiprocessors else 4
    # Not every multiprocessor finds three others of its cluster.
    clusters = multiprocessors if cluster == 1 else multiprocessors // cluster * 10 // 11
    waves = -(-num_outputs * streams // (clusters * TILE_ROWS))
    share = -(-num_outputs // (clusters * waves))
    first = -(-share // BLOCK_ROWS) * BLOCK_ROWS if gated else 0
    slot_bytes = (-(-(first + share) // 8) * 8 + columns) * ROW_BYTES
    left = MEMORY - _sum_bytes(columns) - 16 * (MAX_SLOTS + 1)
    num_slots = min(left // slot_bytes, MAX_SLOTS)
    return Tiling(columns, cluster, share, num_slots, slot_bytes)


def takes(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether the kernel is built for this product."""
    num_rows, width = x.shape
    if not (1 <= num_rows <= MAX_ROWS and x.dtype in DTYPES and weight.dtype == x.dtype):
        return False
    if width % 8 or width < STEP * max(CLUSTERS) or weight.shape[0] % (2 if gated else 1):
        return False
    is_aligned = all(t.data_ptr() % 16 == 0 for t in (x, weight))
    has_rows = x.stride(1) == 1 and (num_rows == 1 or x.stride(0) % 8 == 0)
    return is_aligned and has_rows and weight.is_contiguous() and jit.is_hopper(x.device)


def _variant(dtype: torch.dtype, columns: int, cluster: int) -> jit.Variant:
    return jit.variant("skinny.cu", dtype, only="sm_90a", COLUMNS=columns, CLUSTER=cluster)


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    for dtype in DTYPES:
        for columns in COLUMNS:
            for cluster in CLUSTERS:
                yield _variant(dtype, columns, cluster)


@skinny.cuda
def _skinny(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    jit.require(
        takes(x, weight, gated), f"skinny: no kernel for {[*x.shape]} {x.dtype}, {weight.dtype}"
    )
    num_outputs = weight.shape[0] // (2 if gated else 1)
    tiles = tiling(len(x), num_outputs, gated, jit.num_multiprocessors(x.get_device()))
    return launch(tiles, x, weight, bias, gated, residual)


def launch(
    tiles: Tiling,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`skinny` on the GPU with tiles of choice."""
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    jit.require(out.stride(1) == 1, "skinny: elements of a row of the residual must be contiguous")
    stride = width if num_rows == 1 else x.stride(0)
    jit.launch(
        _variant(x.dtype, tiles.columns, tiles.cluster),
        "skinny",
        (-(-num_outputs // tiles.share) * tiles.cluster,),
        THREADS,
        tensor_map.boxes(weight, len(weight), width, tiles.share),
        tensor_map.boxes(x, num_rows, width, tiles.columns, stride),
        0 if bias is None else bias,
        out,
        out.stride(0),
        num_rows,
        num_outputs,
        -(-width // STEP),
        2 if gated else 1,
        tiles.share,
        tiles.num_slots,
        tiles.slot_bytes,
        int(residual is not None),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
    return out
