"""Paged caches for the timing cases of attention."""

import torch
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.cache.kv_spec import KVSpec
from timing import BLOCK, DTYPE, HEAD_SIZE, KV_HEADS, rows


def kv_spec(name: str, kv_heads: int, head_size: int) -> KVSpec:
    """Return the `KVSpec` of one layer in this format."""
    return KVSpec(FORMATS.get(name, DTYPE), kv_heads, head_size, BLOCK, num_layers=1)


def token_bytes(name: str = "auto", kv_heads: int = KV_HEADS, head_size: int = HEAD_SIZE) -> int:
    """Return the bytes of a token's K and V in this format, scales included."""
    return kv_spec(name, kv_heads, head_size).token_bytes


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
    shape = kv_spec(name, kv_heads, head_size).layer_shape(sum(counts))
    if name == "auto":
        cache = rows(*shape)
    else:  # no code of a scale is NaN's, and none is large
        cache = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda").view(FORMATS[name])
    return cache, tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
