"""Paged caches for the timing cases of attention."""

import torch
from timing import BLOCK, HEAD_SIZE, KV_HEADS, rows


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cache, block tables and lengths of sequences in shuffled blocks."""
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for s, ids in enumerate(order.split(counts)):
        tables[s, : len(ids)] = ids
    cache = rows(sum(counts), KV_HEADS, 2, BLOCK, HEAD_SIZE)
    return cache, tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
