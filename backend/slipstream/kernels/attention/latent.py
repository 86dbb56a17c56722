"""Attention over a cache of latents (DeepSeek-AI, 2024): one row a token, for all heads.

A row is a latent, of which keys and values are made, and a key that is rotated. Queries come as the
matrix of keys has them, so that a dot product with the row is a score; results are means of
latents, of which the matrix of values makes those of heads.

The kernel reads a token once for `ROWS` rows of queries, which are heads of one token or, in a
chunk, of several. 16 heads a token read 1,152 bytes for 34,816 multiply-adds, which memory bounds;
128 heads of one token are two CTAs that read the same tile, the second from the L2 cache.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.rules import LATENT_SIZES
from slipstream.kernels.cache.pages import gather
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

_WARPS, _TILE, _MIN_SPLIT = 8, 32, 128  # as in latent.cu
_MAX_SPLITS = 64
_SHARED_ROWS = (64, 32, 16)  # of queries a CTA, in 16 bits


class LatentCall(NamedTuple):
    """Arguments of `latent_attention`."""

    q: Tensor  # [n, hq, row]
    cache: Tensor  # [block, 1, first or second half, token in block, row / 2]
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor | None  # [s + 1] i32: rows of q of each sequence; None: one of each
    lengths: Tensor  # [s] i32: cached tokens, those of the queries included
    out: Tensor  # [n, hq, latent], written
    scale: float  # of the scores
    max_queries: int = 1  # of the longest chunk
    splits: bool = False  # may several multiprocessors share what a row sees


@op("q[n,hq,_]:T, cache[_,_,2,_,_]:any, block_tables[s,_]:i32")
@flattened(LatentCall)
def latent_attention(call: LatentCall) -> Tensor:
    """Causal attention as `prefill_attention` has it; a row's first numbers are its value.

    A row's bits depend on its position and the tokens up to it alone, unless it `splits`. Length 0
    gives zeros.
    """
    q, size = call.q, call.out.shape[2]
    starts = range(len(q) + 1) if call.query_starts is None else call.query_starts.tolist()
    call.out.zero_()
    for s, length in enumerate(call.lengths.tolist()):
        begin, end = starts[s], starts[s + 1]
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


class LatentShape(NamedTuple):
    """The shape of a CTA."""

    rows: int  # of queries
    stages: int  # tiles in flight

    def shared_memory(self, dtype: torch.dtype, row: int) -> int:
        """Bytes of queries, tiles, scores, weights, and two numbers of a row's softmax."""
        pitch = row * dtype.itemsize + 16
        words = (self.rows + self.stages * _TILE) * pitch + 8 * self.rows
        if dtype == torch.float32:
            return words + self.rows * _TILE * 4
        return words + (64 * 4 + self.rows * 2) * (_TILE + 8)


def shapes(dtype: torch.dtype, num_heads: int) -> list[LatentShape]:
    """Return the shapes for so many heads, the best first: each needs less memory than the last."""
    if dtype == torch.float32:
        return [LatentShape(_WARPS, 1)]
    most = next((rows for rows in _SHARED_ROWS if rows <= num_heads), _SHARED_ROWS[-1])
    found = [LatentShape(rows, 2) for rows in _SHARED_ROWS if rows <= most]
    return [*found, LatentShape(_SHARED_ROWS[-1], 1)]


def _variant(dtype: torch.dtype, sizes: tuple[int, int], shape: LatentShape) -> jit.Variant:
    return jit.variant(
        "attention/latent.cu",
        dtype,
        RANK=sizes[0],
        ROTATED=sizes[1],
        ROWS=shape.rows,
        STAGES=shape.stages,
        MMA=int(dtype != torch.float32),
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in jit.DTYPES:
        for sizes in LATENT_SIZES:
            for shape in shapes(dtype, _SHARED_ROWS[0]):
                yield _variant(dtype, sizes, shape)


def num_splits(items: int, capacity: int, num_multiprocessors: int) -> int:
    """Return the most parts of what a row sees: two CTAs a multiprocessor, if `items` are fewer."""
    wanted = -(-2 * num_multiprocessors // max(1, items))
    return max(1, min(_MAX_SPLITS, wanted, -(-capacity // _MIN_SPLIT)))


def _check(call: LatentCall) -> tuple[int, int]:
    """Return the sizes of a row's parts; `KernelError` unless layouts are as the kernel assumes."""
    q, cache, row, rank = call.q, call.cache, call.q.shape[2], call.out.shape[2]
    name, sizes = "latent_attention", (rank, row - rank)
    jit.require(sizes in LATENT_SIZES, "{}: no kernels of latents of {} and {}", name, *sizes)
    jit.require(cache.dtype == q.dtype, "{}: a cache of {} for {}", name, cache.dtype, q.dtype)
    is_half = cache.shape[1] == 1 and 2 * cache.shape[4] == row
    jit.require(is_half, "{}: a cache of {} for rows of {}", name, [*cache.shape], row)
    tensors = [q, cache, call.lengths, call.out]
    tensors += [] if call.query_starts is None else [call.query_starts]
    are_whole = all(x.is_contiguous() for x in tensors) and call.out.dtype == q.dtype
    jit.require(are_whole, "{}: tensors must be contiguous, out otherwise like q", name)
    are_aligned = all(x.data_ptr() % 16 == 0 for x in (q, cache, call.out))
    jit.require(are_aligned, "{}: q, cache and out must be aligned to 16 bytes", name)
    has_tables = call.block_tables.stride(1) == 1 or call.block_tables.shape[1] <= 1
    jit.require(has_tables, "{}: a row of block_tables must be contiguous", name)
    return sizes


@latent_attention.cuda
@flattened(LatentCall)
def _latent_attention(call: LatentCall) -> Tensor:
    q, cache, block_tables, starts, lengths, out, scale, most, may_split = call
    sizes, num_heads, count = _check(call), call.q.shape[1], len(call.lengths)
    shift = jit.block_shift(cache.shape[3])
    if count == 0 or most == 0 or len(q) == 0:
        return out
    device, row = q.get_device(), q.shape[2]
    limit = jit.shared_memory_limit(device)
    fitting = [s for s in shapes(q.dtype, num_heads) if s.shared_memory(q.dtype, row) <= limit]
    shape = fitting[0]
    tiles = -(-most * num_heads // shape.rows)
    capacity = block_tables.shape[1] * cache.shape[3]
    splits = 1
    if may_split:
        splits = num_splits(tiles * count, capacity, jit.num_multiprocessors(device))
    state = len(q) * num_heads * splits * (sizes[0] + 2) if splits > 1 else 1
    partial = torch.empty(state, dtype=torch.float32, device=q.device)
    variant = _variant(q.dtype, sizes, shape)
    jit.launch(
        variant,
        "latent_attention",
        (tiles, splits, count),
        32 * _WARPS,
        q,
        cache,
        block_tables,
        block_tables.stride(0),
        starts,
        lengths,
        out,
        partial,
        scale * math.log2(math.e),
        num_heads,
        shift,
        shared_memory=shape.shared_memory(q.dtype, row),
    )
    if splits > 1:
        grid, rest = (most * num_heads, count), (lengths, out, num_heads, splits)
        jit.launch(variant, "combine_latents", grid, 32 * _WARPS, partial, starts, *rest)
    return out
