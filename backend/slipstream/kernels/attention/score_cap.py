"""Attention whose scores are capped (Gemma Team, 2024): `cap * tanh(score / cap)` before the mask.

By torch, in fp32. There are no kernels of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.calls import takes
from slipstream.kernels.cache.pages import first_seen, gather
from slipstream.kernels.runtime.op import op


class CappedCall(NamedTuple):
    """Arguments of `capped_attention`."""

    q: Tensor  # [n, hq, d]
    cache: Tensor  # [block, kv head, K or V, token in block, row]
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor  # [s + 1] i32: rows of q of each chunk
    lengths: Tensor  # [s] i32: cached tokens, those of the chunk included
    out: Tensor  # like q
    scale: float  # of the scores
    cap: float  # that they stay below
    window: int = 0  # tokens that a query sees; 0: all


@op(
    "q[n,hq,d]:T, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, query_starts[_]:i32, "
    "lengths[s]:i32, out[n,hq,d]:T"
)
@takes(CappedCall)
def capped_attention(call: CappedCall) -> Tensor:
    """Write what `prefill_attention` has, of capped scores, to `out`, which is returned."""
    q, cache, tables, starts, lengths, out, scale, cap, window = call
    bounds = starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        seen = first_seen(length - (end - begin), window)
        k, v = (x.float() for x in gather(cache, tables[s], seen, length))
        groups = q[begin:end].float().view(end - begin, cache.shape[1], -1, q.shape[2])
        scores = torch.einsum("nhgd,htd->hgnt", groups, k) * scale
        positions = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        keys = torch.arange(seen, length, device=q.device)
        hidden = keys > positions
        if window:
            hidden |= keys <= positions - window
        capped = (scores / cap).tanh() * cap
        weights = capped.masked_fill(hidden, float("-inf")).softmax(-1)
        found = torch.einsum("hgnt,htd->nhgd", weights, v)
        out[begin:end] = found.flatten(1, 2).to(out.dtype)
    return out
