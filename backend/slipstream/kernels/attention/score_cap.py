"""Attention whose scores are capped (Gemma Team, 2024): `cap * tanh(score / cap)` before the mask.

By torch, in fp32. There are no kernels of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.calls import takes
from slipstream.kernels.attention.chunk_scores import chunk_scores
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
    where = (call.q, call.cache, call.block_tables, call.query_starts, call.lengths)
    for rows, scores, hidden, values in chunk_scores(*where, call.scale, call.window):
        capped = (scores / call.cap).tanh() * call.cap
        weights = capped.masked_fill(hidden, float("-inf")).softmax(-1)
        found = torch.einsum("nhgt,htd->nhgd", weights, values)
        call.out[rows] = found.flatten(1, 2).to(call.out.dtype)
    return call.out
