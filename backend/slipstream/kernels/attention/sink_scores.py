"""Sinks in the softmax (Xiao et al., 2023; OpenAI, 2025): a score that each head has beside tokens.

It takes a share of the softmax and gives nothing, so what attention without it gave is multiplied
by the share that is left: `exp(all) / (exp(all) + exp(sink))`, of the sum of the tokens' scores.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.calls import takes
from slipstream.kernels.attention.chunk_scores import chunk_scores
from slipstream.kernels.runtime.op import op


class SinkScoreCall(NamedTuple):
    """Arguments of `apply_sink_scores`."""

    out: Tensor  # [n, hq, d], of attention without sinks; changed in place
    q: Tensor  # [n, hq, d]
    cache: Tensor  # [block, kv head, K or V, token in block, row]
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor  # [s + 1] i32
    lengths: Tensor  # [s] i32
    scores: Tensor  # [hq]: of the sinks
    scale: float  # of the scores of queries and keys
    window: int = 0  # tokens that a query sees; 0: all


@op(
    "out[n,hq,d]:T, q[n,hq,d]:T, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, query_starts[_]:i32, "
    "lengths[s]:i32, scores[hq]:T"
)
@takes(SinkScoreCall)
def apply_sink_scores(call: SinkScoreCall) -> Tensor:
    """Give each head's sink its share of the softmax, in fp32; returns `out`.

    Rows `query_starts[s] : query_starts[s + 1]` are the last of `lengths[s]` tokens, as those of
    `prefill_attention`.
    """
    where = (call.q, call.cache, call.block_tables, call.query_starts, call.lengths)
    for rows, scores, hidden, _ in chunk_scores(*where, call.scale, call.window):
        every = scores.masked_fill(hidden, float("-inf")).logsumexp(-1).flatten(1)
        share = torch.sigmoid(every - call.scores.float())
        call.out[rows] = (call.out[rows].float() * share[..., None]).to(call.out.dtype)
    return call.out
