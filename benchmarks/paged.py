"""Paged caches for the timing cases of attention."""

import torch
from slipstream.kernels.cache.kv_format import FORMATS, row_size
from timing import BLOCK, DTYPE, HEAD_SIZE, KV_HEADS, rows


def token_bytes(name: str = "auto", kv_heads: int = KV_HEADS, head_size: int = HEAD_SIZE) -> int:
    """Of K and V of a token in this format, scales included."""
    dtype = FORMATS.get(name, DTYPE)
    return 2 * kv_heads * row_size(dtype, head_size) * dtype.itemsize


def paged(
    lengths: list[int],
    name: str = "auto",
    kv_heads: int = KV_HEADS,
    head_size: int = HEAD_SIZE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cache, block tables and lengths of sequences in shuffled blocks."""
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for s, ids in enumerate(order.split(counts)):
        tables[s, : len(ids)] = ids
    shape = (sum(counts), kv_heads, 2, BLOCK)
    if name == "auto":
        cache = rows(*shape, head_size)
    else:  # no code of a scale is NaN's, and none is large
        size = (*shape, row_size(FORMATS[name], head_size))
        cache = torch.randint(0, 120, size, dtype=torch.uint8, device="cuda").view(FORMATS[name])
    return cache, tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
