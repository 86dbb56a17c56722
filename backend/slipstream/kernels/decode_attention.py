"""Attention of one query a sequence over a paged cache.

By plan (16-bit elements): a fixed grid of workers shares out the tiles of all sequences, whatever
their lengths, as a plan says that is made once a step on the device. By split (fp32, and wherever a
sequence's bits may not depend on others): each sequence's tokens over as many CTAs as its length
asks for.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels import decode_prefixes, jit, kv_format
from slipstream.kernels.decode_prefixes import Work, find_prefixes
from slipstream.kernels.op import op
from slipstream.kernels.pages import (
    check,
    first_seen,
    gather,
    stages_of,
    tiles_memory,
    tiles_variant,
    tiles_variants,
    warps_of,
)
from slipstream.kernels.rope import rope_and_cache

# decode_part.cuh: query heads that a worker takes at once; decode_plan.cuh: tokens of a tile.
_COLUMNS, _TILE = 8, 32
# Tiles: what a CTA gets at least; how long its run may be, or how much longer than others, for the
# sake of whole sequences.
_MIN_RUN, _WHOLE_RUN, _WHOLE_MORE = 4, 16, 8
_PLAN_CTAS, _PLAN_THREADS = 16, 512
_MOST_SEQUENCES = 16384
_MIN_SPLIT, _MAX_SPLITS = 256, 32  # decode_split.cu
_MOST_TOKENS = 2**31 - 1


@op("lengths[s]:i32, cache[_,h,2,_,_]:any")
def plan_decode(
    lengths: Tensor,
    cache: Tensor,
    num_q_heads: int,
    window: int = 0,
    block_tables: Tensor | None = None,
) -> Tensor:
    """How the tiles of sequences of these lengths are shared out, for all layers of a step that
    have this window.

    `cache` is that of any of them. What `decode_attention` of the same lengths and window takes,
    one call after the other; i32, opaque. With `block_tables`, which must be those of the calls,
    and no window, tokens that lie in the same blocks of several sequences are read once for them.
    """
    return torch.empty(0, dtype=torch.int32, device=lengths.device)


class Newest(NamedTuple):
    """What `rope_and_cache` takes of the newest token of each sequence."""

    k: Tensor  # [s, h, d]
    v: Tensor  # [s, h, d]
    cos_sin: Tensor  # [positions, d] f32


@op("q[s,hq,d]:T, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, lengths[s]:i32, plan[_]:i32")
def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    plan: Tensor,
    scale: float,
    out: Tensor | None = None,
    newest: Newest | None = None,
    window: int = 0,
) -> Tensor:
    """`softmax(q K^T * scale) V` over the first `lengths[s]` cached tokens; `[s, hq, d]`.

    With a `window`, over the last so many of them. Length 0 gives zeros. The result goes to `out`
    if given. `plan` is `plan_decode` of the lengths and the window, made earlier in the stream;
    without one, of no elements, a sequence's bits do not depend on others. All but the newest token
    of a sequence must be from earlier steps: the kernel reads it while the kernels in front of it
    still run.

    With `newest` (and a plan, and 16-bit elements) it begins with `rope_and_cache`: `q` is rotated
    as it is read, K and V of the newest tokens are written to `cache`.
    """
    kv_format.check("decode_attention", cache, q)
    if newest is not None:
        q = _rotate_and_cache(q, newest, cache, block_tables, lengths)
    out = torch.empty_like(q) if out is None else out
    out.zero_()
    num_kv_heads = cache.shape[1]
    for s, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        first = first_seen(length - 1, window)
        k, v = (x.to(q.dtype) for x in gather(cache, block_tables[s], first, length))
        group = q[s].reshape(num_kv_heads, -1, q.shape[2])  # a kv head's, as its queries
        result = functional.scaled_dot_product_attention(group[None], k[None], v[None], scale=scale)
        out[s] = result[0].flatten(0, 1)
    return out


def _rotate_and_cache(
    q: Tensor, newest: Newest, cache: Tensor, block_tables: Tensor, lengths: Tensor
) -> Tensor:
    """The rotated `q`; `newest` goes into `cache`."""
    positions = (lengths.long() - 1).clamp(min=0)
    block_size = cache.shape[3]
    blocks = block_tables.long().gather(1, (positions // block_size)[:, None])[:, 0]
    slots = torch.where(lengths > 0, blocks * block_size + positions % block_size, -1)
    q = q.clone()
    rope_and_cache.reference(q, newest.k, newest.v, newest.cos_sin, positions, slots, cache)
    return q


# ---- by plan ----


def _part_words(head_size: int) -> int:
    """Of `Part` in decode_part.cuh."""
    return _COLUMNS * (head_size + 4 + 2)


def _state_words(head_size: int) -> int:
    """Of `State` in decode_part.cuh."""
    return head_size + 4


class _Shape(NamedTuple):
    """Of a CTA of decode_attention.cu."""

    warps: int
    slots: int  # of a warp's ring, each of a tile's K or V

    def shared_memory(self, dtype: torch.dtype, head_size: int) -> int:
        """Bytes, over such a cache: for each warp a ring, a part and two entries; two flags."""
        scales = kv_format.num_scales(dtype, head_size)
        chunks = (kv_format.row_size(dtype, head_size) - scales) * dtype.itemsize // 16
        row = 16 * (chunks if chunks in (8, 16) or chunks % 2 else chunks + 1)
        slot = _TILE * row + -(-_TILE * scales // 128) * 128
        return self.warps * (self.slots * slot + 4 * _part_words(head_size) + 2 * 16) + 16


_SHAPES = (_Shape(8, 3), _Shape(8, 2), _Shape(4, 2))  # the first that fits is best
# In fewer bits it is arithmetic that takes the time, and more warps hide more of it.
_QUANTIZED_SHAPES = (_Shape(12, 3), *_SHAPES)


def _variant(
    dtype: torch.dtype,
    head_size: int,
    shape: _Shape,
    rotates: bool,
    window: int,
    shares: bool = False,
    cached: torch.dtype | None = None,
) -> jit.Variant:
    jit.head_size_of(dtype, head_size)
    return jit.variant(
        "decode_attention.cu",
        dtype,
        HEAD_SIZE=head_size,
        WARPS=shape.warps,
        SLOTS=shape.slots,
        ROTATES=int(rotates),
        **_mode(window, shares),
        **kv_format.macros(cached or dtype),
    )


def _is_planned(cached: torch.dtype, head_size: int) -> bool:
    """Whether attention over such a cache is by plan; else it is by split, a plan or not."""
    is_whole = cached != torch.uint8 or head_size % kv_format.GROUP == 0  # vectors of one group
    return cached != torch.float32 and is_whole


def _mode(window: int, shares: bool) -> dict[str, int]:
    return {"WINDOWED": int(window > 0)} | ({"SHARES": 1} if shares else {})


def _plan_variant(window: int, shares: bool = False) -> jit.Variant:
    return jit.variant("decode_plan.cu", **_mode(window, shares))


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    yield from (_plan_variant(window) for window in (0, 1))
    yield _plan_variant(0, shares=True)
    yield from decode_prefixes.variants()
    yield from tiles_variants("decode_split.cu", 3)
    dtypes = (torch.float16, torch.bfloat16)
    for case in itertools.product(dtypes, jit.HEAD_SIZES, _SHAPES, (False, True), (0, 1), (False,)):
        yield _variant(*case)
    for case in itertools.product(dtypes, jit.HEAD_SIZES, _SHAPES, (False, True), (0,), (True,)):
        yield _variant(*case)
    formats = kv_format.FORMATS.values()
    for dtype, head_size, shape in itertools.product(dtypes, jit.HEAD_SIZES, _QUANTIZED_SHAPES):
        for cached, window in itertools.product(formats, (0, 1)):
            if _is_planned(cached, head_size):
                yield _variant(dtype, head_size, shape, False, window, False, cached)


@functools.cache
def _device(index: int, dtype: torch.dtype, head_size: int) -> tuple[int, _Shape]:
    """CTAs of the grid, one for each SM, and their shape, for a cache of this dtype."""
    limit = jit.shared_memory_limit(index)
    shapes = _QUANTIZED_SHAPES if dtype in kv_format.FORMATS.values() else _SHAPES
    shape = next(s for s in shapes if s.shared_memory(dtype, head_size) <= limit)
    return jit.num_multiprocessors(index), shape


def _plan_size(num_sequences: int, num_ctas: int, num_warps: int, shares: bool = False) -> int:
    """Of `Plan` in decode_plan.cuh, as int32."""
    arrivals = -(-num_ctas // 4) * 4
    start, sequence = (12, 4) if shares else (8, 2)
    return arrivals + num_ctas * (8 + start * num_warps) + sequence * (num_sequences + 2)


def _can_share(cache: Tensor, num_sequences: int, window: int) -> bool:
    is_plain = cache.dtype in (torch.float16, torch.bfloat16) and not window
    return is_plain and 1 < num_sequences <= decode_prefixes.MAX_ROWS


def _work(cache: Tensor, num_q_heads: int, num_ctas: int, shape: _Shape) -> Work:
    """Of sequences that share."""
    return Work.of(cache, num_q_heads, 16 * shape.warps, num_ctas)


@plan_decode.cuda
def _plan_decode(
    lengths: Tensor,
    cache: Tensor,
    num_q_heads: int,
    window: int = 0,
    block_tables: Tensor | None = None,
) -> Tensor:
    num_sequences, num_kv_heads = len(lengths), cache.shape[1]
    head_size = kv_format.head_size_of(cache)
    if not _is_planned(cache.dtype, head_size) or num_sequences == 0:
        return torch.empty(0, dtype=torch.int32, device=lengths.device)
    jit.head_size_of(torch.float16, head_size)
    jit.require(lengths.is_contiguous(), "plan_decode: lengths must be contiguous")
    jit.require(
        num_sequences <= _MOST_SEQUENCES, f"plan_decode: more than {_MOST_SEQUENCES} sequences"
    )
    num_ctas, shape = _device(lengths.get_device(), cache.dtype, head_size)
    shares = block_tables is not None and _can_share(cache, num_sequences, window)
    size = own_size = _plan_size(num_sequences, num_ctas, shape.warps, shares)
    if shares:
        work = _work(cache, num_q_heads, num_ctas, shape)
        size += decode_prefixes.num_words(work, num_sequences)
    plan = torch.empty(size, dtype=torch.int32, device=lengths.device)
    if shares and block_tables is not None:
        find_prefixes(block_tables, lengths, plan[own_size:], work)
    parts = -(-(num_q_heads // num_kv_heads) // _COLUMNS)
    jit.launch(
        _plan_variant(window, shares),
        "plan_decode",
        (_PLAN_CTAS,),
        _PLAN_THREADS,
        lengths,
        plan,
        num_sequences,
        num_kv_heads * parts,
        num_ctas,
        shape.warps,
        _MIN_RUN,
        _WHOLE_RUN,
        _WHOLE_MORE,
        window,
        shared_memory=4 * (2 * num_sequences + num_ctas + 1),
    )
    return plan


@decode_attention.cuda
def _decode_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    plan: Tensor,
    scale: float,
    out: Tensor | None = None,
    newest: Newest | None = None,
    window: int = 0,
) -> Tensor:
    check("decode_attention", q, cache, block_tables, lengths, plan)
    jit.block_shift(cache.shape[3])
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    is_like_q = out.shape == q.shape and out.dtype == q.dtype
    jit.require(
        is_like_q and out.is_contiguous() and out.data_ptr() % 16 == 0,
        "decode_attention: out must be contiguous, aligned to 16 bytes and otherwise like q",
    )
    is_quantized = kv_format.is_quantized(cache)
    jit.require(
        newest is None or not is_quantized,
        f"decode_attention: over a cache of {cache.dtype}, rope_and_cache comes before",
    )
    if len(plan) > 0 and q.dtype != torch.float32:
        _launch_by_plan(q, cache, block_tables, lengths, plan, scale, out, newest, window)
    elif len(q) > 0:
        jit.require(newest is None, "decode_attention: without a plan, q must be rotated")
        _launch_by_split(q, cache, block_tables, lengths, scale, out, window)
    return out


def _check_newest(q: Tensor, cache: Tensor, newest: Newest) -> None:
    num_rows, _, head_size = q.shape
    for name, x in (("k", newest.k), ("v", newest.v)):
        is_like_q = x.shape == (num_rows, cache.shape[1], head_size) and x.dtype == q.dtype
        jit.require(is_like_q, f"decode_attention: {name} does not fit q and cache")
        is_row = x.stride(2) == 1 and (x.stride(1) == head_size or x.shape[1] == 1)
        jit.require(is_row, f"decode_attention: heads of a row of {name} must be contiguous")
        is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
        jit.require(is_aligned, f"decode_attention: rows of {name} must be aligned to 16 bytes")
    table = newest.cos_sin
    is_table = table.dtype == torch.float32 and table.shape[1] == head_size
    jit.require(is_table and table.is_contiguous(), "decode_attention: cos_sin is no fp32 table")


def _launch_by_plan(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    plan: Tensor,
    scale: float,
    out: Tensor,
    newest: Newest | None,
    window: int,
) -> None:
    if newest is not None:
        _check_newest(q, cache, newest)
    k, v, cos_sin = newest or (q, q, q)  # q stands for what is not read
    num_sequences, num_q_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    num_ctas, shape = _device(q.get_device(), cache.dtype, head_size)
    num_words = num_ctas * 2 * _part_words(head_size)
    shares = len(plan) != _plan_size(num_sequences, num_ctas, shape.warps)
    if shares:
        work = _work(cache, num_q_heads, num_ctas, shape)
        size = _plan_size(num_sequences, num_ctas, shape.warps, shares=True)
        size += decode_prefixes.num_words(work, num_sequences)
        is_fit = len(plan) == size and not window
        jit.require(is_fit, "decode_attention: the plan is of other sequences")
        num_words += work.max_states(num_sequences) * num_q_heads * _state_words(head_size)
    parts = torch.empty(num_words, dtype=torch.float32, device=q.device)
    jit.launch(
        _variant(q.dtype, head_size, shape, newest is not None, window, shares, cache.dtype),
        "decode_attention",
        (num_ctas,),
        32 * shape.warps,
        q,
        q.stride(0),
        k,
        k.stride(0),
        v,
        v.stride(0),
        cos_sin,
        cache,
        block_tables,
        block_tables.stride(0),
        lengths,
        plan,
        out,
        parts,
        scale * math.log2(math.e),
        num_sequences,
        num_kv_heads,
        num_q_heads // num_kv_heads,
        jit.block_shift(block_size),
        window,
        shared_memory=shape.shared_memory(cache.dtype, head_size),
        overlaps=True,
    )


# ---- by split ----


def _launch_by_split(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    window: int,
) -> None:
    num_sequences, num_q_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    capacity = min(block_tables.shape[1] * block_size, window or _MOST_TOKENS)
    splits = max(1, min(_MAX_SPLITS, -(-capacity // _MIN_SPLIT)))
    size = num_sequences * num_q_heads * splits * (head_size + 2) if splits > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=q.device)
    group_size = num_q_heads // num_kv_heads
    stages = stages_of(q, cache, 3 if q.element_size() == 2 else 2)
    wanted = tiles_variant("decode_split.cu", q.dtype, head_size, stages, window, cache.dtype)
    jit.launch(
        wanted,
        "decode_split",
        (splits, num_kv_heads * -(-group_size // 16), num_sequences),
        32 * warps_of(q.dtype),
        q,
        q.stride(0),
        cache,
        block_tables,
        block_tables.stride(0),
        lengths,
        out,
        partial,
        scale * math.log2(math.e),
        num_kv_heads,
        group_size,
        jit.block_shift(block_size),
        window,
        shared_memory=tiles_memory(q.dtype, head_size, stages, cache.dtype),
    )
    if splits > 1:
        grid = (num_q_heads, num_sequences)
        jit.launch(wanted, "combine_splits", grid, head_size, partial, lengths, out, splits, window)
