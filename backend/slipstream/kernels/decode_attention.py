"""Attention of one query a sequence over a paged cache."""

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

_MIN_SPLIT, _MAX_SPLITS = 256, 32  # as in decode_attention.cu


@op("lengths[s]:i32, cache[_,h,2,_,d]:T")
def plan_decode(lengths: Tensor, cache: Tensor, num_q_heads: int) -> Tensor:
    """How the tiles of sequences of these lengths are shared out, for all layers of a step.

    `cache` is that of any layer. What `decode_attention` of the same lengths takes; i32, opaque.
    """
    return torch.empty(0, dtype=torch.int32, device=lengths.device)


@op("q[s,hq,d]:T, cache[_,h,2,_,d]:T, block_tables[s,_]:i32, lengths[s]:i32, plan[_]:i32")
def decode_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, plan: Tensor, scale: float
) -> Tensor:
    """`softmax(q K^T * scale) V` over the first `lengths[s]` cached tokens; `[s, hq, d]`.

    Length 0 gives zeros. `plan` is `plan_decode` of the lengths.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    for s, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        k, v = gather(cache, block_tables[s, : -(-length // block_size)], length)
        group = q[s].reshape(
            num_kv_heads, -1, q.shape[2]
        )  # a kv head's query heads, as its queries
        result = functional.scaled_dot_product_attention(group[None], k[None], v[None], scale=scale)
        out[s] = result[0].flatten(0, 1)
    return out


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    return tiles_variants("decode_attention.cu", 3)


@plan_decode.cuda
def _plan_decode(lengths: Tensor, cache: Tensor, num_q_heads: int) -> Tensor:
    return plan_decode.reference(lengths, cache, num_q_heads)


@decode_attention.cuda
def _decode_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, plan: Tensor, scale: float
) -> Tensor:
    check("decode_attention", q, cache, block_tables, lengths)
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
    stages = stages_of(q, 3 if q.element_size() == 2 else 2)
    wanted = tiles_variant("decode_attention.cu", q.dtype, head_size, stages)
    jit.launch(
        wanted,
        "decode_attention",
        (splits, num_kv_heads * -(-group_size // 16), num_sequences),
        32 * warps_of(q.dtype),
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
        shared_memory=tiles_memory(q.dtype, head_size, stages),
    )
    if splits > 1:
        grid = (num_q_heads, num_sequences)
        jit.launch(wanted, "combine_splits", grid, head_size, partial, lengths, out, splits)
    return out
