"""The paged cache as the attention kernels see it: `[block, kv head, K or V, token in block, d]`.

`block_tables[s]` lists the blocks of sequence s in order; query head h reads kv head
`h // (hq / h_kv)`. With a `window` the token at position p sees positions
`max(0, p - window + 1) .. p`, without one (0) all up to p. Entries of blocks that nobody sees are
not read: those past a sequence's length, and those in front of the window.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels import jit, kv_format


def first_seen(position: int, window: int) -> int:
    """The first position that the token at `position` sees."""
    return max(0, position - window + 1) if window else 0


def gather(cache: Tensor, table: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of positions `begin .. end - 1` of one sequence as `[kv head, position, d]`.

    In the dtype of the cache, fp32 if that is of fewer bits (kv_format.py).
    """
    size = cache.shape[3]
    skipped = begin // size
    blocks = table[skipped : -(-end // size)]
    pages = cache.permute(2, 1, 0, 3, 4).index_select(2, blocks)  # one copy, already in order
    flat = kv_format.read(pages).flatten(2, 3)
    flat = flat[:, :, begin - skipped * size : end - skipped * size]
    return flat[0], flat[1]


def check(op_name: str, q: Tensor, cache: Tensor, block_tables: Tensor, *vectors: Tensor) -> None:
    """What the kernels assume of layouts, beyond the signature, or `KernelError`."""
    head_size, num_q_heads, num_kv_heads = q.shape[2], q.shape[1], cache.shape[1]
    jit.head_size_of(q.dtype, head_size)
    jit.require(
        num_q_heads % num_kv_heads == 0,
        f"{op_name}: {num_q_heads} query heads are no multiple of {num_kv_heads} kv heads",
    )
    is_row = q.stride(2) == 1 and (q.stride(1) == head_size or num_q_heads == 1)
    jit.require(is_row, f"{op_name}: heads of a row of q must be contiguous")
    jit.require(cache.is_contiguous(), f"{op_name}: cache must be contiguous")
    kv_format.check(op_name, cache, q)
    is_whole = not kv_format.is_quantized(cache) or cache.shape[3] >= kv_format.MIN_BLOCK_SIZE
    jit.require(is_whole, f"{op_name}: blocks of {cache.shape[3]} tokens of {cache.dtype}")
    jit.require(
        all(x.is_contiguous() for x in vectors),
        f"{op_name}: query_starts and lengths must be contiguous",
    )
    wide = 16 // q.element_size()
    is_aligned = q.data_ptr() % 16 == 0 and cache.data_ptr() % 16 == 0 and q.stride(0) % wide == 0
    jit.require(is_aligned, f"{op_name}: rows of q and cache must be aligned to 16 bytes")
    jit.require(
        block_tables.stride(1) == 1 or block_tables.shape[1] <= 1,
        f"{op_name}: a row of block_tables must be contiguous",
    )


# ---- tiles.cuh ----


def warps_of(dtype: torch.dtype) -> int:
    """Warps of a CTA; a tile holds 16 tokens for each."""
    return 2 if dtype == torch.float32 else 4


def tiles_memory(
    dtype: torch.dtype, head_size: int, stages: int, cached: torch.dtype | None = None
) -> int:
    """Bytes of shared memory for `stages` tiles; `cached` is the cache's dtype."""
    tokens = 16 * warps_of(dtype)
    tiles = stages * 2 * tokens * (head_size * dtype.itemsize + 16)
    scratch = tokens * head_size * 4 if dtype == torch.float32 else 0  # the queries, per warp
    return tiles + scratch + 2 * tokens * _staged(cached, head_size)


def _staged(cached: torch.dtype | None, head_size: int) -> int:
    """Bytes of a row that are copied before they become numbers."""
    if cached is None or cached not in kv_format.FORMATS.values():
        return 0
    return kv_format.row_size(cached, head_size) - kv_format.num_scales(cached, head_size)


def stages_of(q: Tensor, cache: Tensor, wish: int) -> int:
    """Tiles in flight: as many as wished, or two where shared memory is small, or the cache is in
    fewer bits.
    """
    wished = tiles_memory(q.dtype, q.shape[2], wish)
    fits = wished <= jit.shared_memory_limit(q.device.index)
    return wish if fits and not kv_format.is_quantized(cache) else 2


def tiles_variant(
    source: str,
    dtype: torch.dtype,
    head_size: int,
    stages: int,
    window: int,
    cached: torch.dtype | None = None,
) -> jit.Variant:
    """The instantiation of a kernel that includes tiles.cuh; `cached` is the cache's dtype."""
    jit.head_size_of(dtype, head_size)
    return jit.variant(
        source,
        dtype,
        HEAD_SIZE=head_size,
        WARPS=warps_of(dtype),
        STAGES=stages,
        MMA=int(dtype != torch.float32),
        WINDOWED=int(window > 0),
        **kv_format.macros(cached or dtype),
    )


def tiles_variants(source: str, stages: int) -> Iterator[jit.Variant]:
    """Every legal instantiation, for up to `stages` tiles in flight."""
    for dtype in jit.DTYPES:
        for head_size in jit.HEAD_SIZES:
            for count in range(2, stages + 1 if dtype != torch.float32 else 3):
                for window in (0, 1):
                    yield tiles_variant(source, dtype, head_size, count, window)
            for cached in kv_format.FORMATS.values():
                for window in (0, 1):
                    yield tiles_variant(source, dtype, head_size, 2, window, cached)
