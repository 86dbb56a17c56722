"""Attention over a paged cache: one query a sequence (decode), or a chunk of queries (prefill).

`cache` is `[block, kv head, K or V, token in block, d]`; `block_tables[s]` lists the blocks of sequence
s in order (entries past its length are not read); query head h reads kv head `h // (hq / h_kv)`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.op import op


def _gather(cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence as `[kv head, length, d]`."""
    pages = cache[blocks.long()]  # [blocks, kv head, 2, block_size, d]
    flat = pages.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return flat[0], flat[1]


@op("q[s,hq,d]:T, cache[_,h,2,_,d]:T, block_tables[s,_]:i32, lengths[s]:i32")
def decode_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """`softmax(q K^T * scale) V` over the first `lengths[s]` cached tokens; `[s, hq, d]`.

    Length 0 gives zeros.
    """
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return prefill_attention.reference(q, cache, block_tables, starts, lengths, scale, 1)


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
