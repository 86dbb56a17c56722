"""Attention over a paged cache: one query a sequence (decode), or a chunk of queries (prefill).

`cache` is `[block, kv head, K or V, token in block, d]`; `block_tables[s]` lists the blocks of
sequence s in order (entries past its length are not read); query head h reads kv head
`h // (hq / h_kv)`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import jit
from slipstream.kernels.op import op

_MIN_SPLIT, _MAX_SPLITS = 256, 32  # as in attention.cu


def _gather(cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence as `[kv head, length, d]`."""
    pages = cache.permute(2, 1, 0, 3, 4).index_select(2, blocks)  # one copy, already in order
    flat = pages.flatten(2, 3)[:, :, :length]
    return flat[0], flat[1]


@op("q[s,hq,d]:T, cache[_,h,2,_,d]:T, block_tables[s,_]:i32, lengths[s]:i32")
def decode_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """`softmax(q K^T * scale) V` over the first `lengths[s]` cached tokens; `[s, hq, d]`.

    Length 0 gives zeros.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    for s, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        k, v = _gather(cache, block_tables[s, : -(-length // block_size)], length)
        group = q[s].reshape(
            num_kv_heads, -1, q.shape[2]
        )  # a kv head's query heads, as its queries
        result = functional.scaled_dot_product_attention(group[None], k[None], v[None], scale=scale)
        out[s] = result[0].flatten(0, 1)
    return out


@op("q[n,hq,d]:T, cache[_,h,2,_,d]:T, block_tables[s,_]:i32, query_starts[s1]:i32, lengths[s]:i32")
def prefill_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_queries: int,
) -> Tensor:
    """Causal attention of chunks: rows `query_starts[s] : query_starts[s+1]` of `q` are the last
    positions of the `lengths[s]` tokens cached for sequence s; `[n, hq, d]`.

    `max_queries` is the longest chunk (it sizes the grid).
    """
    out = torch.zeros_like(q)
    bounds, sizes = query_starts.tolist(), lengths.tolist()
    for s, length in enumerate(sizes):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        blocks = block_tables[s, : -(-length // cache.shape[3])]
        k, v = _gather(cache, blocks, length)
        positions = torch.arange(length - (end - begin), length, device=q.device)
        mask = torch.arange(length, device=q.device) <= positions[:, None]
        result = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], k[None], v[None], mask, scale=scale, enable_gqa=True
        )
        out[begin:end] = result[0].transpose(0, 1)
    return out


def _warps(dtype: torch.dtype) -> int:
    """Warps of a CTA; a tile holds 16 tokens for each."""
    return 2 if dtype == torch.float32 else 4


def _shared_memory(dtype: torch.dtype, head_size: int, stages: int) -> int:
    tokens = 16 * _warps(dtype)
    tiles = stages * 2 * tokens * (head_size * dtype.itemsize + 16)
    scratch = tokens * head_size * 4 if dtype == torch.float32 else 0  # the queries, per warp
    return tiles + scratch


def _variant(dtype: torch.dtype, head_size: int, stages: int) -> jit.Variant:
    uses_mma = int(dtype != torch.float32)
    warps = _warps(dtype)
    jit.head_size_of(dtype, head_size)
    return jit.variant(
        "attention.cu", dtype, HEAD_SIZE=head_size, WARPS=warps, STAGES=stages, MMA=uses_mma
    )


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    for dtype in jit.DTYPES:
        for head_size in jit.HEAD_SIZES:
            for stages in (2,) if dtype == torch.float32 else (2, 3):
                yield _variant(dtype, head_size, stages)


def _check(op_name: str, q: Tensor, cache: Tensor, block_tables: Tensor, *vectors: Tensor) -> None:
    """What the kernels assume of layouts, beyond the signature."""
    head_size, num_q_heads, num_kv_heads = q.shape[2], q.shape[1], cache.shape[1]
    jit.head_size_of(q.dtype, head_size)
    jit.require(
        num_q_heads % num_kv_heads == 0,
        f"{op_name}: {num_q_heads} query heads are no multiple of {num_kv_heads} kv heads",
    )
    is_row = q.stride(2) == 1 and (q.stride(1) == head_size or num_q_heads == 1)
    jit.require(is_row, f"{op_name}: heads of a row of q must be contiguous")
    jit.require(cache.is_contiguous(), f"{op_name}: cache must be contiguous")
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


def _stages(q: Tensor, wish: int) -> int:
    """Tiles in flight: as many as wished, or two where shared memory is small."""
    wished = _shared_memory(q.dtype, q.shape[2], wish)
    return wish if wished <= jit.shared_memory_limit(q.device.index) else 2


@decode_attention.cuda
def _decode_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    _check("decode_attention", q, cache, block_tables, lengths)
    num_sequences, num_q_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    shift = jit.block_shift(block_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_sequences == 0:
        return out
    capacity = block_tables.shape[1] * block_size
    splits = max(1, min(_MAX_SPLITS, -(-capacity // _MIN_SPLIT)))
    size = num_sequences * num_q_heads * splits * (head_size + 2) if splits > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=q.device)
    group_size = num_q_heads // num_kv_heads
    stages = _stages(q, 3 if q.element_size() == 2 else 2)
    wanted = _variant(q.dtype, head_size, stages)
    jit.launch(
        wanted,
        "decode_attention",
        (splits, num_kv_heads * -(-group_size // 16), num_sequences),
        32 * _warps(q.dtype),
        q,
        q.stride(0),
        cache,
        block_tables,
        block_tables.stride(0),
        lengths,
        out,
        partial,
        scale * math.log2(math.e),
        num_kv_heads,
        group_size,
        shift,
        shared_memory=_shared_memory(q.dtype, head_size, stages),
    )
    if splits > 1:
        grid = (num_q_heads, num_sequences)
        jit.launch(wanted, "combine_splits", grid, head_size, partial, lengths, out, splits)
    return out


@prefill_attention.cuda
def _prefill_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_queries: int,
) -> Tensor:
    _check("prefill_attention", q, cache, block_tables, query_starts, lengths)
    num_q_heads, head_size = q.shape[1:]
    jit.require(
        len(query_starts) == len(lengths) + 1,
        f"prefill_attention: {len(query_starts)} query_starts for {len(lengths)} lengths",
    )
    shift = jit.block_shift(cache.shape[3])
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # rows of no chunk stay zero
    if out.numel() == 0 or len(lengths) == 0 or max_queries == 0:
        return out
    warps = _warps(q.dtype)
    stages = _stages(q, 2)
    jit.launch(
        _variant(q.dtype, head_size, stages),
        "prefill_attention",
        (num_q_heads, -(-max_queries // (16 * warps)), len(lengths)),
        32 * warps,
        q,
        q.stride(0),
        cache,
        block_tables,
        block_tables.stride(0),
        query_starts,
        lengths,
        out,
        scale * math.log2(math.e),
        cache.shape[1],
        num_q_heads // cache.shape[1],
        shift,
        shared_memory=_shared_memory(q.dtype, head_size, stages),
    )
    return out
