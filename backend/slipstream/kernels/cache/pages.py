"""The paged cache as the attention kernels see it: `[block, kv head, K or V, token in block, d]`.

`block_tables[s]` lists the blocks of sequence s in order; query head h reads kv head
`h // (hq / h_kv)`. With a `window` the token at position p sees positions
`max(0, p - window + 1) .. p`, without one (0) all up to p. Entries of blocks that no token sees are
not read: those past a sequence's length, and those in front of the window.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cache import kv_format
from slipstream.kernels.runtime import jit


def first_seen(position: int, window: int) -> int:
    """The first position that the token at `position` sees."""
    return max(0, position - window + 1) if window else 0


def gather(cache: Tensor, table: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of positions `begin .. end - 1` of one sequence as `[kv head, position, d]`.

    They have the dtype of the cache, or fp32 if that has fewer bits (kv_format.py).
    """
    size = cache.shape[3]
    skipped = begin // size
    blocks = table[skipped : -(-end // size)]
    if kv_format.is_quantized(cache):
        pages = kv_format.read(cache.index_select(0, blocks)).permute(2, 1, 0, 3, 4)
    else:
        pages = cache.permute(2, 1, 0, 3, 4).index_select(2, blocks)  # one copy, already in order
    flat = pages.flatten(2, 3)
    flat = flat[:, :, begin - skipped * size : end - skipped * size]
    return flat[0], flat[1]


def check_layouts(
    op_name: str, q: Tensor, cache: Tensor, block_tables: Tensor, *vectors: Tensor
) -> None:
    """Raise `KernelError` unless layouts are as the kernels assume beyond the signature."""
    head_size, num_q_heads, num_kv_heads = q.shape[2], q.shape[1], cache.shape[1]
    jit.head_size_of(q.dtype, head_size)
    jit.require(
        num_q_heads % num_kv_heads == 0,
        "{}: {} query heads are no multiple of {} kv heads",
        op_name,
        num_q_heads,
        num_kv_heads,
    )
    is_row = q.stride(2) == 1 and (q.stride(1) == head_size or num_q_heads == 1)
    jit.require(is_row, "{}: heads of a row of q must be contiguous", op_name)
    jit.require(cache.is_contiguous(), "{}: cache must be contiguous", op_name)
    kv_format.check_cache(op_name, cache, q)
    is_whole = not kv_format.is_quantized(cache) or cache.shape[3] >= kv_format.MIN_BLOCK_SIZE
    jit.require(is_whole, "{}: blocks of {} tokens of {}", op_name, cache.shape[3], cache.dtype)
    are_vectors = all(x.is_contiguous() for x in vectors)
    jit.require(are_vectors, "{}: query_starts and lengths must be contiguous", op_name)
    wide = 16 // q.element_size()
    is_aligned = q.data_ptr() % 16 == 0 and cache.data_ptr() % 16 == 0 and q.stride(0) % wide == 0
    jit.require(is_aligned, "{}: rows of q and cache must be aligned to 16 bytes", op_name)
    has_tables = block_tables.stride(1) == 1 or block_tables.shape[1] <= 1
    jit.require(has_tables, "{}: a row of block_tables must be contiguous", op_name)


# ---- tiles.cuh ----


class TileShape(NamedTuple):
    """The tile of a CTA; two stages fit the 99 KiB of small GPUs in every cache format."""

    warps: int
    tokens: int  # of a tile
    stages: int  # tiles in flight, at most

    def shared_memory(
        self, dtype: torch.dtype, head_size: int, stages: int, cached: torch.dtype | None = None
    ) -> int:
        """Bytes for `stages` tiles; `cached` is the cache's dtype."""
        tiles = stages * 2 * self.tokens * (head_size * dtype.itemsize + 16)
        scratch = 16 * self.warps * head_size * 4 if dtype == torch.float32 else 0  # the queries
        return tiles + scratch + 2 * self.tokens * _staged(cached, head_size)

    def stages_of(self, q: Tensor, cache: Tensor) -> int:
        """Tiles in flight: two where shared memory is small, or the cache is in fewer bits."""
        most = self.shared_memory(q.dtype, q.shape[2], self.stages)
        fits = most <= jit.shared_memory_limit(q.device.index)
        return self.stages if fits and not kv_format.is_quantized(cache) else 2


def _staged(cached: torch.dtype | None, head_size: int) -> int:
    """Bytes of a row that are copied before they become numbers."""
    if cached is None or cached not in kv_format.FORMATS.values():
        return 0
    return kv_format.row_size(cached, head_size) - kv_format.num_scales(cached, head_size)


@functools.cache
def tiles_variant(
    source: str,
    dtype: torch.dtype,
    head_size: int,
    shape: TileShape,
    stages: int,
    window: int,
    cached: torch.dtype | None = None,
    sinks: bool = False,
    **more: int,
) -> jit.Variant:
    """The instantiation of a kernel that includes tiles.cuh; `cached` is the cache's dtype.

    `more` are other macros.
    """
    jit.head_size_of(dtype, head_size)
    jit.require(not (sinks and jit.has_large_heads(head_size)), f"no sinks of heads of {head_size}")
    return jit.variant(
        source,
        dtype,
        HEAD_SIZE=head_size,
        WARPS=shape.warps,
        TILE=shape.tokens,
        STAGES=stages,
        MMA=int(dtype != torch.float32),
        WINDOWED=int(window > 0),
        **({"SINKS": 1} if sinks else {}),
        **more,
        **kv_format.macros(cached or dtype),
    )


def tiles_variants(
    source: str,
    shape_of: Callable[[torch.dtype, int], TileShape],
    sinks: bool = False,
    more: Sequence[Mapping[str, int]] = ({},),
) -> Iterator[jit.Variant]:
    """Every legal instantiation; `shape_of` dtype and head size is a CTA's.

    `more` are other macros, of which each instantiation has one set.
    """
    windows = (1,) if sinks else (0, 1)
    for dtype, head_size, own in itertools.product(jit.DTYPES, jit.HEAD_SIZES, more):
        if sinks and jit.has_large_heads(head_size):
            continue
        shape = shape_of(dtype, head_size)
        for stages, window in itertools.product(range(2, shape.stages + 1), windows):
            tile = (shape, stages, window)
            yield tiles_variant(source, dtype, head_size, *tile, None, sinks, **own)
        for cached, window in itertools.product(kv_format.FORMATS.values(), windows):
            tile = (shape, 2, window)
            yield tiles_variant(source, dtype, head_size, *tile, cached, sinks, **own)
