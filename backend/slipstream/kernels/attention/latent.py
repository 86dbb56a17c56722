"""Attention over a cache of latents (DeepSeek-AI, 2024): one row a token, for all heads.

A row is a latent, of which keys and values are made, and a key that is rotated. Queries come as the
matrix of keys has them, so that a dot product with the row is a score; results are means of
latents, of which the matrix of values makes those of heads. By torch, in fp32. There are no
kernels of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.calls import takes
from slipstream.kernels.cache.pages import gather
from slipstream.kernels.runtime.op import op


class LatentCall(NamedTuple):
    """Arguments of `latent_attention`."""

    q: Tensor  # [n, hq, row]
    cache: Tensor  # [block, 1, first or second half, token in block, row / 2]
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor  # [s + 1] i32: rows of q of each sequence
    lengths: Tensor  # [s] i32: cached tokens, those of the queries included
    out: Tensor  # [n, hq, latent], written
    scale: float  # of the scores


@op(
    "q[n,hq,_]:T, cache[_,_,2,_,_]:any, block_tables[s,_]:i32, query_starts[_]:i32, "
    "lengths[s]:i32, out[n,hq,_]:T"
)
@takes(LatentCall)
def latent_attention(call: LatentCall) -> Tensor:
    """Causal attention as `prefill_attention` has it; a row's first numbers are its value."""
    q, bounds, size = call.q, call.query_starts.tolist(), call.out.shape[2]
    call.out.zero_()
    for s, length in enumerate(call.lengths.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        halves = gather(call.cache, call.block_tables[s], 0, length)
        rows = torch.cat([half[0].float() for half in halves], -1)
        positions = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        hidden = torch.arange(length, device=q.device) > positions
        scores = torch.einsum("nhr,tr->hnt", q[begin:end].float(), rows) * call.scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        found = torch.einsum("hnt,tr->nhr", weights, rows[:, :size])
        call.out[begin:end] = found.to(call.out.dtype)
    return call.out
