"""The likeliest tokens of rows of logits, and value and rank of a given one; no sort on a GPU.

It runs behind `sample`, of those rows alone that want it (`ASK`), and reads the same logits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import TopMode
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op
from slipstream.kernels.runtime.team import THREADS
from slipstream.kernels.sampling.sample import (
    GROUP,
    MAX_COUNT,
    ROW,
    ROW_WORDS,
    processed_logits,
    variant_of,
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
MAX_TOP = 64  # no more than the kernel's subsets
_SOURCE = "sampling/top_log_probs.cu"
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
) -> tuple[Tensor, Tensor]:
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
    parts, temperatures = zip(*made, strict=True)
    return torch.cat(parts), torch.cat(temperatures)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the `k` highest logits of each row, equal ones by rising id, `[n, k]`."""
    if k == 0:
        return torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)
    logits = logits.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    lowest = logits.topk(k).values[:, -1:]
    above, equal = logits > lowest, logits == lowest
    room = k - above.sum(-1, keepdim=True)
    ids = (above | (equal & (equal.cumsum(-1) <= room))).nonzero()[:, 1].view(-1, k)
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


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

    A value is a log prob, or a logit by `TopMode.LOGITS`; tokens are by falling logit, equal ones
    by rising id. A rank is the token's place in that order, from 1. Nothing of the results means
    anything where a logit is NaN. The kernel knows no filter: processed values of a
    row with one are the reference's to compute.

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
        ranked, temperature = logits[at].float(), torch.ones((), device=logits.device)
        if is_processed:
            processed = processed_after(logits[at], rows[at], edits, counts, tokens)
            ranked, temperature = processed
        has_logits = ((asks[which, 2] & _LOGITS) != 0)[:, None]
        values = ranked / temperature
        values = torch.where(has_logits, values, values.log_softmax(-1))
        order = _likeliest(ranked, k)
        own_ranked = ranked.gather(-1, tokens[:, None])
        is_before = torch.arange(size, device=logits.device) < tokens[:, None]
        better = (ranked > own_ranked) | ((ranked == own_ranked) & is_before)
        out.top_ids[which, :k] = order.int()
        out.top_values[which, :k] = values.gather(-1, order)
        out.ranks[which] = 1 + better.sum(-1).int()
        out.values[which] = values.gather(-1, tokens[:, None])[:, 0]


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from (variant_of(_SOURCE, dtype) for dtype in jit.DTYPES)


@top_log_probs.cuda
def _top_log_probs(
    logits: Tensor,
    asks: Tensor,
    rows: Tensor,
    edits: Tensor,
    counts: Tensor,
    sampled: Tensor,
    out: TopResults,
) -> None:
    size, width = logits.shape[1], out.top_ids.shape[1]
    jit.require(0 < size < 2**31 - 2**20, f"top_log_probs: {size} tokens")
    jit.require(logits.stride(1) == 1 or size == 1, "top_log_probs: rows must be contiguous")
    dense = (asks, rows, edits, counts, sampled, *out)
    jit.require(all(t.is_contiguous() for t in dense), "top_log_probs: all but logits: contiguous")
    is_aligned = (
        size % GROUP == 0
        and logits.stride(0) % GROUP == 0
        and logits.data_ptr() % (GROUP * logits.element_size()) == 0
    )
    if len(asks) == 0:
        return
    jit.launch(
        variant_of(_SOURCE, logits.dtype),
        "top_log_probs",
        (len(asks),),
        THREADS,
        *(logits, logits.stride(0), size, int(is_aligned), asks, rows, edits, counts, sampled),
        *(out.top_ids.data_ptr(), out.top_values.data_ptr(), width),
        *(out.ranks.data_ptr(), out.values.data_ptr()),
    )
