"""Attention of chunks of queries over a paged cache."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import jit
from slipstream.kernels.op import op
from slipstream.kernels.pages import (
    check,
    gather,
    stages_of,
    tiles_memory,
    tiles_variant,
    tiles_variants,
    warps_of,
)


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
        k, v = gather(cache, blocks, length)
        positions = torch.arange(length - (end - begin), length, device=q.device)
        mask = torch.arange(length, device=q.device) <= positions[:, None]
        result = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], k[None], v[None], mask, scale=scale, enable_gqa=True
        )
        out[begin:end] = result[0].transpose(0, 1)
    return out


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    return tiles_variants("prefill_attention.cu", 2)


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
    check("prefill_attention", q, cache, block_tables, query_starts, lengths)
    num_q_heads, head_size = q.shape[1:]
    jit.require(
        len(query_starts) == len(lengths) + 1,
        f"prefill_attention: {len(query_starts)} query_starts for {len(lengths)} lengths",
    )
    shift = jit.block_shift(cache.shape[3])
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # rows of no chunk stay zero
    if out.numel() == 0 or len(lengths) == 0 or max_queries == 0:
        return out
    warps = warps_of(q.dtype)
    stages = stages_of(q, 2)
    jit.launch(
        tiles_variant("prefill_attention.cu", q.dtype, head_size, stages),
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
        shared_memory=tiles_memory(q.dtype, head_size, stages),
    )
    return out
