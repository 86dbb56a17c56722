"""The likeliest tokens of rows of logits, and value and rank of a given one; no sort on a GPU.

It runs behind `sample`, of those rows alone that want it (`ASK`), and reads the same logits.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import TopMode
from slipstream.kernels.runtime.op import op
from slipstream.kernels.sampling.sample import (
    MAX_COUNT,
    ROW,
    ROW_WORDS,
    processed_logits,
)

ASK = np.dtype(
    [
        ("row", "<i4"),  # of the logits, and of the `ROW` records if processed ones are wanted
        ("num_top", "<i4"),  # likeliest tokens wanted, at most `MAX_TOP`
        ("mode", "<i4"),  # flags of `TopMode`
        ("token", "<i4"),  # the one whose value and rank are wanted; -1: what the row sampled
    ]
)
ASK_WORDS = ASK.itemsize // 4
MAX_TOP = 64
assert ROW.fields is not None
_SLOT, _RESULT = (ROW.fields[name][1] // 4 for name in ("slot", "result"))
_PROCESSED, _LOGITS = int(TopMode.PROCESSED), int(TopMode.LOGITS)
_MOST_PROCESSED = 8  # rows at a time: each takes some 30 bytes a token


class TopResults(NamedTuple):
    """What `a` asks get; on a GPU in pinned host memory."""

    top_ids: Tensor  # [a, MAX_TOP] i32; behind `num_top` they mean nothing
    top_values: Tensor  # [a, MAX_TOP] f32, of these
    ranks: Tensor  # [a] i32, of the ask's token
    values: Tensor  # [a] f32, of the ask's token


def _before_sampling(counts: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
    """Return rows `slots` of `counts` as they were before `tokens` were counted."""
    state, every = counts[slots], torch.arange(len(slots), device=slots.device)
    own = state[every, tokens]
    state[every, tokens] = own - ((own & MAX_COUNT) > 0).to(own.dtype)
    return state


def processed_after(
    logits: Tensor, rows: Tensor, edits: Tensor, counts: Tensor, tokens: Tensor
) -> Tensor:
    """Return `processed_logits` of rows whose `tokens [n] i64` have been sampled and counted."""
    made = []
    for begin in range(0, len(rows), _MOST_PROCESSED):
        part = slice(begin, begin + _MOST_PROCESSED)
        own, state = rows[part].clone(), counts
        if len(counts) > 0:
            # Without penalties a slot may be any.
            slots = own[:, _SLOT].long().clamp(0, len(counts) - 1)
            state = _before_sampling(counts, slots, tokens[part])
            own[:, _SLOT] = torch.arange(len(own), dtype=torch.int32, device=own.device)
        made.append(processed_logits(logits[part], own, edits, state))
    return torch.cat(made)


@op(
    f"logits[n,v]:T, asks[a,{ASK_WORDS}]:i32, rows[r,{ROW_WORDS}]:i32, edits[e,2]:i32, "
    "counts[s,v]:i16, sampled[p]:i64"
)
def top_log_probs(
    logits: Tensor,
    asks: Tensor,
    rows: Tensor,
    edits: Tensor,
    counts: Tensor,
    sampled: Tensor,
    out: TopResults,
) -> None:
    """Find the `num_top` likeliest tokens of each ask, and value and rank of the ask's token.

    A value is a log prob, or a logit by `TopMode.LOGITS`; tokens are by falling value, equal ones
    by rising id. A rank is the token's place in that order, from 1. Nothing of the results means
    anything where a logit is NaN.

    Args:
        logits: `[n, v]` fp32, fp16 or bf16, as `sample` read them.
        asks: `ASK` records as words.
        rows, edits, counts: as `sample` had them, but `counts` with the sampled tokens in it.
        sampled: `[p]`, of which a row's is `row.result`.
        out: written.
    """
    size = logits.shape[1]
    for is_processed in (False, True):
        picked = ((asks[:, 2] & _PROCESSED) != 0) == is_processed
        which = picked.nonzero()[:, 0]
        if len(which) == 0:
            continue
        at, k = asks[which, 0].long(), int(asks[which, 1].clamp(0, min(MAX_TOP, size)).max())
        tokens = asks[which, 3].long()
        if bool((tokens < 0).any()):
            own = sampled[rows[at, _RESULT].long().clamp(min=0)]
            tokens = torch.where(tokens < 0, own, tokens)
        part = logits[at].float()
        if is_processed:
            part = processed_after(logits[at], rows[at], edits, counts, tokens)
        has_logits = ((asks[which, 2] & _LOGITS) != 0)[:, None]
        part = torch.where(has_logits, part, part.log_softmax(-1))
        order = part.sort(dim=-1, descending=True, stable=True).indices
        own_values = part.gather(-1, tokens[:, None])
        is_before = torch.arange(size, device=part.device) < tokens[:, None]
        better = (part > own_values) | ((part == own_values) & is_before)
        out.top_ids[which, :k] = order[:, :k].int()
        out.top_values[which, :k] = part.gather(-1, order[:, :k])
        out.ranks[which] = 1 + better.sum(-1).int()
        out.values[which] = own_values[:, 0]
