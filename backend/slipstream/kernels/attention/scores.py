"""Changes of scores between the dot product of query and key, and the softmax.

- A cap (Gemma Team, 2024): `cap * tanh(score / cap)`, before the mask.
- Slopes, ALiBi (Press et al., 2022): a head's slope, times the position of the key less that of the
  query, is added to a score.
- Sinks (Xiao et al., 2023; OpenAI, 2025): each head has a score beside those of tokens. It takes a
  share of the softmax and gives nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.chunk_scores import chunk_scores
from slipstream.kernels.attention.rules import CAPPED, PLAIN, SINKING, SLOPED
from slipstream.kernels.runtime import jit

_NUMBERS = {CAPPED: 1, SLOPED: 2, SINKING: 3}  # as in scores.cuh


class Scores(NamedTuple):
    """How a layer changes scores; a kernel makes one change at most."""

    cap: float = 0.0  # 0: none
    slopes: Tensor | None = None  # [hq] f32
    sinks: Tensor | None = None  # [hq] f32

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the changes, as rules.py has them."""
        made = {CAPPED: self.cap, SLOPED: self.slopes is not None, SINKING: self.sinks is not None}
        return tuple(name for name, is_made in made.items() if is_made)


UNCHANGED = Scores()


def changed_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int,
    changed: Scores,
) -> Tensor:
    """Write what `prefill_attention` has, of changed scores, to `out`, which is returned; by torch,
    in fp32.
    """
    where = (q, cache, block_tables, query_starts, lengths)
    for rows, scores, hidden, values, distances in chunk_scores(*where, scale, window):
        groups = scores.shape[1:3]
        if changed.cap:
            scores = (scores / changed.cap).tanh() * changed.cap
        if changed.slopes is not None:
            scores = scores + changed.slopes.view(*groups, 1) * distances
        scores = scores.masked_fill(hidden, float("-inf"))
        if changed.sinks is not None:
            sinks = changed.sinks.float().view(1, *groups, 1).expand(len(scores), *groups, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : values.shape[1]]
        found = torch.einsum("nhgt,htd->nhgd", weights, values)
        out[rows] = found.flatten(1, 2).to(out.dtype)
    return out


class Passed(NamedTuple):
    """A change as a kernel takes it: scores.cuh."""

    kind: str  # as rules.py names it
    cap: float
    heads: Tensor | None  # [hq] f32: slopes, or scores of sinks


def passed(op_name: str, q: Tensor, changed: Scores) -> Passed:
    """Return what a kernel takes of a change; raise `KernelError` if none can make it."""
    made = changed.changes
    jit.require(len(made) < 2, "{}: no kernel makes two changes of scores", op_name)
    kind = made[0] if made else PLAIN
    heads = changed.slopes if changed.slopes is not None else changed.sinks
    if heads is None:
        return Passed(kind, changed.cap, None)
    is_vector = heads.dtype == torch.float32 and heads.shape == (q.shape[1],)
    is_there = heads.is_contiguous() and heads.device == q.device
    jit.require(is_vector and is_there, "{}: slopes or sinks are no fp32 vector of heads", op_name)
    return Passed(kind, 0.0, heads)


def macros(kind: str) -> dict[str, int]:
    """Return the macros of a kernel that makes this change, or none."""
    return {} if kind == PLAIN else {"SCORES": _NUMBERS[kind]}


def all_macros() -> tuple[dict[str, int], ...]:
    """Return the macros of every kind."""
    return tuple(map(macros, (PLAIN, *_NUMBERS)))
