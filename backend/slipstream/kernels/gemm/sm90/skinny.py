"""Products of up to 128 rows with a weight matrix on Hopper's tensor cores (sm_90a), memory-bound.

A tile of weight rows belongs to one CTA, or to a cluster of CTAs that share out the width where
there are few rows.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise import fp8
from slipstream.kernels.gemm.cublaslt import matmul
from slipstream.kernels.gemm.sm90.gemv import gemv
from slipstream.kernels.runtime import jit, tensor_map
from slipstream.kernels.runtime.op import op

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
MAX_ROWS = 128
GROUP_ROWS = 64  # of x, for each group of warps
CLUSTERS = (1, 2, 4)
TILE_ROWS = range(16, 225, 16)
_FEWEST_TILE_ROWS = {1: 64, 2: 48, 4: 16}  # a narrower tile reads more of x than of the weights
_MOST_SHARED_ROWS = {1: 112, 2: 224}  # of a cluster's tile, by groups
# Of more than 64 rows of x, power is the limit, and reading x costs some: tiles are to have so many
# rows, where the clusters for that leave each CTA so many steps.
_THRIFTY_TILE_ROWS, _THRIFTY_STEPS = 128, 48
CHUNK_BYTES = 128  # of a row
MAX_SLOTS = 16
BARRIER_BYTES = 16  # of a slot
PIECE_BYTES = 64 * 8 * 4  # of a group's sums for eight weight rows
MEMORY = 226 << 10  # of a CTA; a kernel of a norm finds room beside it


@op("x[n,k]:T, weight[_,k]:T")
def wide(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scales: fp8.Scales | None = None,
) -> Tensor:
    """`x W^T + b`, accumulated in fp32 and rounded once; `[n, m]`, `[n, m / 2]` if `gated`.

    `gated` makes `silu(gate) * up` of `[gate | up]`. With `residual`, that is what is changed and
    returned. Of e4m3 the product is rounded to bf16; all else needs `scales`, which have its bias
    and make `fp8.scale` of it first, not rounded once more before a sum or a gate.
    """
    require_around(x, bias, gated, residual, scales)
    if x.dtype != fp8.E4M3:
        return gemv.reference(x, weight, bias=bias, gated=gated, residual=residual)
    product = matmul.reference(x, weight)
    if scales is None:
        return product
    values = fp8.scaled(product, *scales)
    if gated:
        gate, up = values.chunk(2, dim=-1)
        values = functional.silu(gate) * up
    if residual is None:
        return values.to(product.dtype)
    return residual.copy_(residual.float() + values)


def require_around(
    x: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scales: fp8.Scales | None = None,
) -> None:
    """Raise `KernelError` unless these go with a product of `x`."""
    if x.dtype != fp8.E4M3:
        jit.require(scales is None, f"wide: {x.dtype} has no scales")
        return
    jit.require(bias is None, "wide: of e4m3, biases are in the scales")
    is_plain = residual is None and not gated
    jit.require(is_plain or scales is not None, "wide: of e4m3, gates and sums need scales")
    others = (residual, None if scales is None else scales.bias)
    is_bf16 = all(t is None or t.dtype == torch.bfloat16 for t in others)
    jit.require(is_bf16, "wide: of e4m3, biases and residuals are bfloat16")


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is shared out: tiles of `rows` weight rows, a cluster of CTAs for each."""

    rows: int
    groups: int  # of 64 rows of x
    cluster: int

    @property
    def chunks(self) -> int:
        """Of 128 bytes of each row, in a slot."""
        return 2 if self.groups == 1 else 1

    @property
    def slot_bytes(self) -> int:
        """Of the weights and of x."""
        return (self.rows + GROUP_ROWS * self.groups) * self.chunks * CHUNK_BYTES

    @property
    def end_bytes(self) -> int:
        """Beside the ring: scales and biases of columns, and what others send of their sums.

        Where two groups are in clusters of four, that comes to where the ring was.
        """
        columns = BARRIER_BYTES + 2 * 4 * self.rows
        if self.cluster == 4 and self.groups == 2:
            return columns
        own = 2 * -(-self.rows // (16 * self.cluster))  # pieces of eight columns
        return columns + (self.cluster - 1) * own * PIECE_BYTES * self.groups

    @property
    def num_slots(self) -> int:
        """That fit into the shared memory of a multiprocessor."""
        slots = (MEMORY - self.end_bytes) // (self.slot_bytes + BARRIER_BYTES)
        return min(slots, MAX_SLOTS)

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.num_slots * (self.slot_bytes + BARRIER_BYTES) + self.end_bytes


def _rows_and_waves(num_weight_rows: int, cluster: int, multiprocessors: int) -> tuple[int, int]:
    tiles = multiprocessors // cluster
    if cluster == 4:  # not every multiprocessor finds three others of its cluster
        tiles = tiles * 10 // 11
    waves = -(-num_weight_rows // (tiles * TILE_ROWS[-1]))
    return -(-num_weight_rows // (tiles * waves * 16)) * 16, waves


@functools.cache
def tiling(num_rows: int, num_weight_rows: int, num_chunks: int, multiprocessors: int) -> Tiling:
    """For `num_rows` rows of x: every multiprocessor gets a part of the weights, the same for all.

    The sums of an output are added in an order that does not depend on `num_rows`, but for whether
    these are two groups.
    """
    groups = -(-num_rows // GROUP_ROWS)
    tilings = {c: _rows_and_waves(num_weight_rows, c, multiprocessors) for c in CLUSTERS}
    chosen = next(c for c, (rows, _) in tilings.items() if rows >= _FEWEST_TILE_ROWS[c])
    if groups == 2 and tilings[chosen][0] < _THRIFTY_TILE_ROWS:
        for cluster, (rows, waves) in tilings.items():
            if rows >= _THRIFTY_TILE_ROWS and waves == 1 and num_chunks >= cluster * _THRIFTY_STEPS:
                chosen = cluster
                break
    return Tiling(tilings[chosen][0], groups, chosen)


def takes(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether the kernel is built for this product, and the fastest."""
    num_rows, width = x.shape
    num_weight_rows = weight.shape[0]
    if x.dtype not in DTYPES or weight.dtype != x.dtype or not jit.is_hopper(x.device):
        return False
    if not 1 <= num_rows <= MAX_ROWS:
        return False
    chunk = CHUNK_BYTES // x.itemsize
    if width % chunk or width < chunk * max(CLUSTERS) or num_weight_rows % (16 if gated else 8):
        return False
    if num_rows > GROUP_ROWS and num_weight_rows > TILE_ROWS[-1] * _multiprocessors(x):
        return False  # in several waves they are slower than cuBLASLt's
    return tensor_map.can_map(x, weight)


def _multiprocessors(x: Tensor) -> int:
    return jit.num_multiprocessors(x.get_device())


def _variant(dtype: torch.dtype, tiles: Tiling) -> jit.Variant:
    is_fp8 = dtype == fp8.E4M3
    return jit.variant(
        "gemm/sm90/skinny.cu",
        torch.bfloat16 if is_fp8 else dtype,
        only="sm_90a",
        FP8=int(is_fp8),
        ROWS=tiles.rows,
        GROUPS=tiles.groups,
        CLUSTER=tiles.cluster,
    )


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    for dtype, groups, cluster in itertools.product(DTYPES, (1, 2), CLUSTERS):
        most = TILE_ROWS[-1] if cluster == 1 else _MOST_SHARED_ROWS[groups]
        for rows in range(_FEWEST_TILE_ROWS[cluster], most + 1, TILE_ROWS.step):
            yield _variant(dtype, Tiling(rows, groups, cluster))


@wide.cuda
def _wide(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    scales: fp8.Scales | None = None,
) -> Tensor:
    is_taken = takes(x, weight, gated)
    jit.require(is_taken, "wide: no kernel for {} {}, {}", x.shape, x.dtype, weight.dtype)
    require_around(x, bias, gated, residual, scales)
    by_row, by_column, bias = (0, 0, bias) if scales is None else scales
    num_rows, width = x.shape
    num_weight_rows = weight.shape[0]
    num_outputs = num_weight_rows // (2 if gated else 1)
    out = residual
    if out is None:
        dtype = torch.bfloat16 if x.dtype == fp8.E4M3 else x.dtype
        out = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    jit.require(
        out.stride(1) == 1 and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0,
        "wide: rows of the residual must be contiguous, and aligned to 16 bytes",
    )
    num_chunks = width * x.itemsize // CHUNK_BYTES
    tiles = tiling(num_rows, num_weight_rows, num_chunks, _multiprocessors(x))
    share = tiles.rows // (2 if gated else 1)
    copied = -(-num_rows // 8) * 8
    jit.launch(
        _variant(x.dtype, tiles),
        "wide",
        (-(-num_outputs // share) * tiles.cluster,),
        128 * tiles.groups + 64,
        tensor_map.eights(weight, tiles.chunks, share),
        tensor_map.boxes(x, num_rows, width, copied, x.stride(0)),
        by_row,
        by_column,
        0 if bias is None else bias,
        out,
        out.stride(0),
        num_rows,
        num_outputs,
        -(-num_chunks // tiles.chunks),
        int(gated),
        tiles.num_slots,
        copied,
        int(residual is not None),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
    return out
