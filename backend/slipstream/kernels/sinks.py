"""Attention that keeps the first tokens of a sequence and a window of the last (Xiao et al., 2023).

Of a cache of `window` tokens the first `num_sinks` of the sequence, the sinks, hold the front, and
its newest tokens the rest. A query and what it sees have the positions that they hold there. Among
the newest, rotated by their true positions, that makes no difference: rotation tells distances
alone, and theirs are true. But sinks stay where they are while the sequence goes on; so a query
sees them as `sink_q`, rotated by the position that it has in the cache.
"""

import torch
from torch import Tensor

from slipstream.kernels.op import op
from slipstream.kernels.pages import first_seen, gather


@op(
    "q[n,hq,d]:T, sink_q[n,hq,d]:T, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, "
    "query_starts[s1]:i32, lengths[s]:i32"
)
def sink_attention(
    q: Tensor,
    sink_q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    num_sinks: int,
) -> Tensor:
    """Attention of rows `query_starts[s] : query_starts[s+1]` of q, the last of the `lengths[s]`
    tokens in the table of sequence s; `[n, hq, d]`.

    A query sees the table's first `num_sinks` tokens and the last `window - num_sinks` up to its
    own. What a sequence has forgotten may be missing between them, as whole blocks.
    """
    out = torch.zeros_like(q)
    bounds, num_kv_heads = query_starts.tolist(), cache.shape[1]
    for s, length in enumerate(lengths.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        positions = torch.arange(length - (end - begin), length)
        # The window's first token of the first query; sinks are no part of it.
        first = max(num_sinks, first_seen(int(positions[0]), window - num_sinks))
        sinks = min(num_sinks, length)
        parts = [gather(cache, block_tables[s], 0, sinks)]
        if first < length:
            parts.append(gather(cache, block_tables[s], first, length))
        k, v = (torch.cat(both, dim=1).float() for both in zip(*parts, strict=True))
        seen = torch.cat((torch.arange(sinks), torch.arange(first, max(first, length))))
        group = (num_kv_heads, -1, end - begin, q.shape[2])  # kv heads, their queries
        own, capped = (x[begin:end].float().transpose(0, 1).reshape(group) for x in (q, sink_q))
        scores = own @ k[:, None].transpose(2, 3)
        scores[..., :sinks] = capped @ k[:, None, :sinks].transpose(2, 3)
        is_near = seen > positions[:, None] - (window - num_sinks)
        mask = (seen <= positions[:, None]) & ((seen < num_sinks) | is_near)
        weights = (scores * scale).masked_fill(~mask, -torch.inf).softmax(-1)
        result = (weights @ v[:, None]).reshape(-1, end - begin, q.shape[2])
        out[begin:end] = result.transpose(0, 1).to(q.dtype)
    return out
