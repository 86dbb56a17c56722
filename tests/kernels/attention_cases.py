"""Paged caches with NaN wherever nothing may be read; attention over them in any precision."""

import dataclasses
from dataclasses import dataclass

import torch
from slipstream.kernels.cache import kv_format
from torch import Tensor

HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
HEADS = ((1, 1), (32, 8), (8, 8), (7, 1), (6, 2), (28, 4), (16, 1), (32, 1), (48, 2), (40, 5))


@dataclass
class Case:
    """Sequences whose K and V lie scattered over a cache."""

    q: Tensor  # [n, hq, d]
    cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    lengths: Tensor
    chunks: list[int]
    window: int = 0

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5


def make_case(
    chunks: list[int],
    lengths: list[int],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cuda",
    seed: int = 0,
    window: int = 0,
) -> Case:
    """Random blocks in random places; block 0 (where tables end) and unused rows are NaN.

    Blocks that no query's window reaches are NaN too, and tables say of some that they lie far
    outside of the cache.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in lengths]
    total = sum(num_blocks) + 2
    shape = (total, heads[1], 2, block_size, head_size)
    cache = torch.randn(shape, generator=generator).to(dtype)
    order = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    cache[0] = float("nan")
    width = max(num_blocks) + 3
    tables = torch.zeros((len(lengths), width), dtype=torch.int32)
    used = 0
    for s, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
        ids = order[used : used + count]
        used += count
        tables[s, :count] = torch.tensor(ids, dtype=torch.int32)
        skipped = max(0, length - chunks[s] - window + 1) // block_size if window else 0
        cache[ids[:skipped]] = float("nan")
        tables[s, : min(skipped, count) : 2] = 2**30
        if length % block_size:
            cache[ids[-1], :, :, length % block_size :] = float("nan")
    cache[order[used:]] = float("nan")
    # Rows of a wider matrix, as a model's qkv projection gives them.
    rows = torch.randn((sum(chunks), (heads[0] + 2) * head_size), generator=generator).to(dtype)
    rows = rows.to(device)
    q = rows[:, : heads[0] * head_size].unflatten(1, (heads[0], head_size))
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    return Case(
        q,
        cache.to(device),
        tables.to(device),
        starts.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        chunks,
        window,
    )


def in_format(case: Case, dtype: torch.dtype) -> tuple[Case, Case]:
    """The case with its cache in fewer bits, and with the numbers that are left of it."""
    cache = case.cache
    row = kv_format.row_size(dtype, cache.shape[4])
    quantized = torch.zeros((*cache.shape[:4], row), dtype=dtype, device=cache.device)
    tokens = cache.permute(0, 3, 2, 1, 4).flatten(0, 1)  # [slot, K or V, kv head, d]
    slots = torch.arange(len(tokens), device=cache.device)
    kv_format.write(quantized, slots, tokens[:, 0], tokens[:, 1])
    left = dataclasses.replace(case, cache=kv_format.read(quantized))
    return dataclasses.replace(case, cache=quantized), left


def attend(case: Case, dtype: torch.dtype) -> Tensor:
    """Softmax attention, every intermediate in `dtype`; rows of empty sequences are zero."""
    out = torch.zeros(case.q.shape, dtype=dtype, device=case.q.device)
    block_size, group = case.cache.shape[3], case.q.shape[1] // case.cache.shape[1]
    start = 0
    for s, chunk in enumerate(case.chunks):
        length = int(case.lengths[s])
        rows = slice(start, start + chunk)
        start += chunk
        if length == 0 or chunk == 0:
            continue
        first = max(0, length - chunk - case.window + 1) if case.window else 0
        skipped = first // block_size
        blocks = case.block_tables[s, skipped : -(-length // block_size)].long()
        first, seen = skipped * block_size, length - skipped * block_size
        flat = case.cache[blocks].to(dtype).permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :seen]
        k, v = (x.repeat_interleave(group, 0) for x in flat)
        scores = case.q[rows].to(dtype).transpose(0, 1) @ k.transpose(1, 2) * case.scale
        positions = torch.arange(length - chunk, length, device=case.q.device)[:, None]
        tokens = torch.arange(first, length, device=case.q.device)
        hidden = tokens > positions
        if case.window:
            hidden |= tokens <= positions - case.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = (weights @ v).transpose(0, 1)
    return out


def configurations() -> list[tuple[tuple[int, int], int, int]]:
    """(heads, head size, block size): every head size with every block size and every group."""
    with_blocks = [((6, 2), d, block) for d in HEAD_SIZES for block in BLOCK_SIZES]
    with_heads = [(heads, d, 32) for d in HEAD_SIZES for heads in HEADS]
    return with_blocks + with_heads
