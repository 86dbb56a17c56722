"""Attention of chunks of queries over a paged cache."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.attention.rules import WGMMA_HEAD_SIZES, Case, no_parts, no_wgmma
from slipstream.kernels.attention.scores import (
    UNCHANGED,
    Scores,
    all_macros,
    changed_attention,
    macros,
    passed,
)
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.pages import (
    TileShape,
    check_layouts,
    first_seen,
    gather,
    tiles_variant,
    tiles_variants,
)
from slipstream.kernels.runtime import jit, tape, tensor_map
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

_WGMMA_ROWS, _WGMMA_STAGES = 128, 2  # as in prefill_wgmma.cu
_MOST_PARTS, _WARP_ROWS = 384, 16  # as in prefill_items.cuh, prefill_parts.cuh


class PrefillCall(NamedTuple):
    """Arguments of `prefill_attention`."""

    q: Tensor  # [n, hq, d]
    cache: Tensor  # [block, kv head, K or V, token in block, row]
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor  # [s + 1] i32: rows of q of each chunk
    lengths: Tensor  # [s] i32: cached tokens, those of the chunk included
    scale: float  # of the scores
    max_queries: int  # of the longest chunk
    out: Tensor | None = None  # rows like those of q; None: new ones
    window: int = 0  # tokens that a query sees; 0: all
    splits: bool = False  # may several multiprocessors share a chunk
    changed: Scores = UNCHANGED
    are_small: bool = False  # chunks are many, and small: prefill.cu's on a Hopper GPU, too


class SinkRows(NamedTuple):
    """Arguments of `launch_tiles` for sequences that stream, as in `sink_attention`."""

    num_sinks: int
    angles: Tensor  # [n, d] f32
    positions: Tensor  # [n] i64


@op(
    "q[n,hq,d]:T, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, query_starts[s1]:i32, "
    "lengths[s]:i32",
    package=__package__,
)
@flattened(PrefillCall)
def prefill_attention(call: PrefillCall) -> Tensor:
    """Causal attention of chunks: rows `query_starts[s] : query_starts[s+1]` of `q` are the last
    positions of the `lengths[s]` tokens cached for sequence s; `[n, hq, d]`.

    With a `window`, a token sees the last so many up to itself (pages.py). `max_queries` is the
    longest chunk (it sizes the grid). The result goes to `out` if given; rows of no chunk are left
    as they are, or undefined. A row's bits depend on its position and the tokens up to it alone:
    not on where chunks begin and end, nor on other sequences. With `splits` they may: where chunks
    are few and small, several multiprocessors share what one attends to. Equal calls still have
    equal bits. `changed` says how scores are changed (scores.py); kernels make one change.
    """
    q, cache, block_tables, query_starts, lengths, scale, _, out, window, _, changed, _ = call
    kv_format.check_cache("prefill_attention", cache, q)
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if changed.changes:
        where = (q, cache, block_tables, query_starts, lengths)
        return changed_attention(*where, out, scale, window, changed)
    bounds, sizes = query_starts.tolist(), lengths.tolist()
    for s, length in enumerate(sizes):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        seen = first_seen(length - (end - begin), window)  # by any
        k, v = (x.to(q.dtype) for x in gather(cache, block_tables[s], seen, length))
        positions = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        keys = torch.arange(seen, length, device=q.device)
        mask = keys <= positions
        if window:
            mask &= keys > positions - window
        result = functional.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None], k[None], v[None], mask, scale=scale, enable_gqa=True
        )
        out[begin:end] = result[0].transpose(0, 1)
    return out


def wgmma_tile(head_size: int) -> int:
    """Tokens of a tile of prefill_wgmma.cu."""
    return 64 if jit.has_large_heads(head_size) else 128


def wgmma_memory(head_size: int) -> int:
    """Bytes of shared memory of a CTA of prefill_wgmma.cu, whose elements have 16 bits."""
    rows = _WGMMA_ROWS + 2 * _WGMMA_STAGES * wgmma_tile(head_size)
    return rows * head_size * 2 + 256  # barriers, items


@functools.cache
def _wgmma_variant(dtype: torch.dtype, head_size: int, splits: bool) -> jit.Variant:
    return jit.variant(
        "attention/sm90/prefill_wgmma.cu",
        dtype,
        only="sm_90a",
        HEAD_SIZE=head_size,
        TILE=wgmma_tile(head_size),
        SPLITS=int(splits),
    )


def tiles_shape(dtype: torch.dtype, head_size: int) -> TileShape:
    """Return the shape of a CTA of prefill.cu: a warp for 16 queries."""
    is_large = jit.has_large_heads(head_size)
    if dtype == torch.float32:
        return TileShape(1, 16, 2) if is_large else TileShape(2, 32, 2)
    return TileShape(4, 16, 3) if is_large else TileShape(4, 64, 2)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from tiles_variants("attention/prefill.cu", tiles_shape, more=all_macros())
    for dtype in (torch.float16, torch.bfloat16):
        for head_size, splits in itertools.product(WGMMA_HEAD_SIZES, (False, True)):
            if not (splits and no_parts(Case(dtype, dtype, head_size))):
                yield _wgmma_variant(dtype, head_size, splits)


_ITEM_WARPS = _WGMMA_ROWS // _WARP_ROWS
_NUM_COUNTERS = 1 + _MOST_PARTS * _ITEM_WARPS  # of items; of arrivals
_COUNTED_LAUNCHES = 256
_launches = itertools.count()


@functools.cache
def _all_counters(device: int) -> Tensor:
    """Zeros, 3 MiB; a launch counts with a row, which others that run meanwhile do not use."""
    shape = (_COUNTED_LAUNCHES, _NUM_COUNTERS)
    zeros = torch.zeros(shape, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # other streams may be the next to use them
    return tape.lasts(zeros)


def _counters(device: int) -> int:
    """Return the address of a launch's counters, which are zero before and after it."""
    row = next(_launches) % _COUNTED_LAUNCHES
    return _all_counters(device).data_ptr() + row * _NUM_COUNTERS * 4


def parts_size(head_size: int) -> int:
    """Floats for the sums of all parts of a launch (27 MB where heads are of 128, 52 of 256)."""
    return _MOST_PARTS * _ITEM_WARPS * 32 * (head_size // 2 + 4)


@functools.cache
def _has(
    dtype: torch.dtype, cached: torch.dtype, head_size: int, has_window: bool, scores: str
) -> tuple[bool, bool]:
    """Whether prefill_wgmma.cu takes such a call, and whether it can cut its chunks into parts."""
    case = Case(dtype, cached, head_size, has_window, scores=scores)
    return no_wgmma(case) is None, no_parts(case) is None


@prefill_attention.cuda
@flattened(PrefillCall)
def _prefill_attention(call: PrefillCall) -> Tensor:
    q, cache, block_tables, query_starts, lengths, scale, max_queries, out, window, splits, own = (
        call[:11]
    )
    check_layouts("prefill_attention", q, cache, block_tables, query_starts, lengths)
    num_starts, num_rows = query_starts.shape[0], lengths.shape[0]
    jit.require(
        num_starts == num_rows + 1,
        "prefill_attention: {} query_starts for {} lengths",
        num_starts,
        num_rows,
    )
    jit.block_shift(cache.shape[3])
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    is_like_q = out.shape == q.shape and out.dtype == q.dtype and out[:1].is_contiguous()
    jit.require(
        is_like_q and out.data_ptr() % 16 == 0 and out.stride(0) * out.element_size() % 16 == 0,
        "prefill_attention: out must be rows like those of q, aligned to 16 bytes",
    )
    if out.numel() == 0 or num_rows == 0 or max_queries == 0:
        return out
    kind = passed("prefill_attention", q, own).kind
    has_wgmma, has_parts = _has(q.dtype, cache.dtype, q.shape[2], window > 0, kind)
    if has_wgmma and not call.are_small and scale > 0 and jit.is_hopper(q.device):
        dtype, head_size = q.dtype, q.shape[2]  # a step of another size may be cut, or not
        both = (False, True) if splits and has_parts else (False,)
        jit.compile_too(_wgmma_variant(dtype, head_size, cut) for cut in both)
        splits = splits and has_parts and _may_split(q, cache, max_queries)
        size = parts_size(q.shape[2]) if splits else 0
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
        launch_wgmma(call, out, parts)
    else:
        launch_tiles(call, out)
    return out


def _row_tiles(q: Tensor, cache: Tensor, max_queries: int) -> int:
    """Items of a kv head of the longest chunk."""
    return -(-max_queries * (q.shape[1] // cache.shape[1]) // _WGMMA_ROWS)


def _may_split(q: Tensor, cache: Tensor, max_queries: int) -> bool:
    """Whether a chunk leaves half of the multiprocessors idle; where it does not, little is gained,
    and tiles take up to a tenth longer in the kernel that can split.
    """
    items = _row_tiles(q, cache, max_queries) * cache.shape[1]
    return 2 * items <= jit.num_multiprocessors(q.get_device())


def launch_wgmma(call: PrefillCall, out: Tensor, parts: Tensor) -> None:
    """Launch `prefill_attention` on Hopper; items are cut if there is room for `parts`."""
    q, cache, block_tables, query_starts, lengths, scale, max_queries = call[:7]
    num_q_heads, head_size = q.shape[1:]
    num_chunks = lengths.shape[0]
    num_blocks, num_kv_heads, _, block_size, _ = cache.shape
    group_size = num_q_heads // num_kv_heads
    num_ctas = jit.num_multiprocessors(q.get_device())
    splits = parts.shape[0] > 0
    if not splits:
        most = _row_tiles(q, cache, max_queries) * num_kv_heads * num_chunks
        num_ctas = min(num_ctas, most)
    tile = wgmma_tile(head_size)
    num_rows = num_blocks * num_kv_heads * 2 * block_size
    jit.require(num_rows < 2**31, "prefill_attention: {} blocks are too many", num_blocks)
    jit.launch(
        _wgmma_variant(q.dtype, head_size, splits),
        "prefill_wgmma",
        (num_ctas,),
        384,
        tensor_map.boxes(cache, num_rows, head_size, min(block_size, tile)),
        q,
        q.stride(0),
        block_tables,
        block_tables.stride(0),
        query_starts,
        lengths,
        out,
        out.stride(0),
        _counters(q.get_device()),
        scale * math.log2(math.e),
        num_chunks,
        num_kv_heads,
        group_size,
        jit.block_shift(block_size),
        *([parts] if splits else []),
        shared_memory=wgmma_memory(head_size),
        overlaps=True,
    )


def launch_tiles(call: PrefillCall, out: Tensor, sinks: SinkRows | None = None) -> None:
    """Launch `prefill_attention` on any GPU, or with `sinks` `sink_attention`."""
    q, cache, block_tables, query_starts, lengths, scale, max_queries, _, window, _, own = call[:11]
    num_q_heads, head_size = q.shape[1:]
    num_kv_heads, shape = cache.shape[1], tiles_shape(q.dtype, head_size)
    stages = shape.stages_of(q, cache)
    num_sinks, angles, positions = sinks or (0, None, None)
    kind, cap, heads = passed("prefill_attention", q, own)
    jit.launch(
        tiles_variant(
            "attention/prefill.cu",
            q.dtype,
            head_size,
            shape,
            stages,
            window,
            cache.dtype,
            sinks is not None,
            **macros(kind),
        ),
        "prefill_attention",
        (num_q_heads, -(-max_queries // (16 * shape.warps)), len(lengths)),
        32 * shape.warps,
        q,
        q.stride(0),
        cache,
        block_tables,
        block_tables.stride(0),
        query_starts,
        lengths,
        out,
        out.stride(0),
        scale * math.log2(math.e),
        num_kv_heads,
        num_q_heads // num_kv_heads,
        jit.block_shift(cache.shape[3]),
        window - num_sinks,
        num_sinks,
        angles,
        positions,
        cap,
        heads,
        shared_memory=shape.shared_memory(q.dtype, head_size, stages, cache.dtype),
    )
