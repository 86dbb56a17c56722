"""Scores of chunks of queries over the paged cache, by torch in fp32: what references share."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cache.pages import first_seen, gather


class ChunkScores(NamedTuple):
    """Scores of one chunk: `n` queries of `h` groups of `g` heads, `t` tokens that some see."""

    rows: slice  # of the queries
    scores: Tensor  # [n, h, g, t] f32, scaled; all, hidden ones too
    hidden: Tensor  # [n, 1, 1, t] bool: tokens that a query does not see
    values: Tensor  # [h, t, d] f32
    distances: Tensor  # [n, 1, 1, t]: from a query's position to a token's; 0 and less are seen


def chunk_scores(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
) -> Iterator[ChunkScores]:
    """Yield the scores of every chunk that has queries; arguments as of `prefill_attention`."""
    bounds = query_starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        seen = first_seen(length - (end - begin), window)
        k, v = (x.to(q.dtype).float() for x in gather(cache, block_tables[s], seen, length))
        groups = q[begin:end].float().view(end - begin, cache.shape[1], -1, q.shape[2])
        positions = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        keys = torch.arange(seen, length, device=q.device)
        hidden = keys > positions
        if window:
            hidden |= keys <= positions - window
        scores = torch.einsum("nhgd,htd->nhgt", groups, k) * scale
        distances = (keys - positions)[:, None, None]
        yield ChunkScores(slice(begin, end), scores, hidden[:, None, None], v, distances)
