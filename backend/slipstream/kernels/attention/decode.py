"""Attention of one query a sequence over a paged cache.

By plan (16-bit elements): a fixed grid of workers shares out the tiles of all sequences, whatever
their lengths, as a plan says that is made once a step on the device. By split (fp32, and wherever a
sequence's bits may not depend on others): each sequence's tokens over as many CTAs as its length
asks for.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.attention import decode_prefixes, decode_shapes
from slipstream.kernels.attention.decode_prefixes import Work, find_prefixes
from slipstream.kernels.attention.decode_shapes import (
    COLUMNS,
    CtaShape,
    attention_variant,
    is_planned,
    part_words,
    plan_variant,
    state_words,
    tile_of,
)
from slipstream.kernels.attention.newest import Newest, check_newest, rotate_and_cache
from slipstream.kernels.attention.rules import PLAIN, Case, no_sharing, no_sinks
from slipstream.kernels.attention.scores import (
    UNCHANGED,
    Scores,
    all_macros,
    changed_attention,
    macros,
    passed,
)
from slipstream.kernels.attention.sinks import Sinks, check_angles, sink_attention
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.pages import (
    TileShape,
    check_layouts,
    first_seen,
    gather,
    tiles_variant,
    tiles_variants,
)
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op

# Tiles: what a CTA gets at least; how long its run may be, or how much longer than with equal ones
# (or by which part of these), for the sake of whole sequences.
_MIN_RUN, _WHOLE_RUN, _WHOLE_MORE, _WHOLE_SHARE = 4, 16, 8, 8
_PLAN_CTAS, _PLAN_THREADS = 16, 512
MOST_SEQUENCES = 16384
_MIN_SPLIT, _MAX_SPLITS = 256, 32  # decode_split.cu
_MOST_TOKENS = 2**31 - 1


class PlanCall(NamedTuple):
    """Arguments of `plan_decode`."""

    lengths: Tensor  # [s] i32
    cache: Tensor  # of any of the layers that the plan is for
    num_q_heads: int
    window: int = 0
    block_tables: Tensor | None = None  # of the calls: what they share is then read once
    num_sinks: int | None = None  # of the window's tokens, first in the sequence; None: no stream
    scores: str = PLAIN  # of the calls: rules.py


class DecodeCall(NamedTuple):
    """Arguments of `decode_attention`."""

    q: Tensor  # [s, hq, d]
    cache: Tensor  # [block, kv head, K or V, token in block, row]
    block_tables: Tensor  # [s, blocks] i32
    lengths: Tensor  # [s] i32
    plan: Tensor  # of `plan_decode`; of no elements: by split
    scale: float  # of the scores
    out: Tensor | None = None  # like q; None: a new one
    newest: Newest | None = None  # to be rotated and cached
    window: int = 0  # tokens that a query sees; 0: all
    sinks: Sinks | None = None
    reads_step: bool = False  # tokens before the newest may be of this step, too
    changed: Scores = UNCHANGED


@op("lengths[s]:i32, cache[_,h,2,_,_]:any")
@flattened(PlanCall)
def plan_decode(call: PlanCall) -> Tensor:
    """Plan how to divide the tiles of sequences of these lengths, for all layers of a step that
    have this window.

    `cache` is that of any of them. The plan, i32 and opaque, is for calls of `decode_attention`
    with the same lengths and window, one after the other. With `block_tables`, which must be those
    of the calls, and no window, tokens that lie in the same blocks of several sequences are read
    once for them.
    `num_sinks` of the window's tokens are the first of a sequence that streams; None: none streams.
    `scores` says how the calls change scores.
    """
    return torch.empty(0, dtype=torch.int32, device=call.lengths.device)


@op(
    "q[s,hq,d]:T, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, lengths[s]:i32, plan[_]:i32",
    package=__package__,
)
@flattened(DecodeCall)
def decode_attention(call: DecodeCall) -> Tensor:
    """`softmax(q K^T * scale) V` over the first `lengths[s]` cached tokens; `[s, hq, d]`.

    With a `window`, over the last so many of them. Length 0 gives zeros. `scale` is positive. The
    result goes to `out` if given. `plan` is `plan_decode` of the lengths and the window, made
    earlier in the stream; without one, of no elements, a sequence's bits do not depend on others.
    All but the newest token of a sequence must be from earlier steps: the kernel reads it while the
    kernels in front of it still run. Unless it `reads_step`: then it starts when these have ended,
    and without `newest`, all tokens may be of this step, and several rows of one table.

    With `newest` (and a plan, and 16-bit elements) it begins with `rope_and_cache`: `q` is rotated
    as it is read, K and V of the newest tokens are written to `cache`.

    With `sinks` (and a plan of as many, a window, a cache of 16 bits) sequences stream, as
    `sink_attention` has it: `window` is all that a query sees, lengths are those of tables.
    `changed` says how scores are changed (scores.py); kernels make one change, without `sinks`.
    """
    q, cache, block_tables, lengths, _, scale, out, newest, window, sinks, reads_step, changed = (
        call
    )
    _check_newest_of_step(newest, reads_step)
    kv_format.check_cache("decode_attention", cache, q)
    _check_scale(scale)
    if newest is not None:
        q = rotate_and_cache(q, newest, cache, block_tables, lengths, sinks is not None)
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    if sinks is not None:
        jit.require(changed == UNCHANGED, "decode_attention: with sinks scores are not changed")
        where = (cache, block_tables, starts, lengths, scale, 1, window, sinks.num_sinks, out)
        return sink_attention.oracle(q, sinks.angles, lengths.long(), *where)
    out = torch.empty_like(q) if out is None else out
    out.zero_()
    if changed.changes:
        rows = (q, cache, block_tables, starts, lengths)
        return changed_attention(*rows, out, scale, window, changed)
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


def _check_newest_of_step(newest: Newest | None, reads_step: bool) -> None:
    jit.require(
        newest is None or not reads_step,
        "decode_attention: rows that attend to each other's tokens must find them in the cache",
    )


def _check_scale(scale: float) -> None:
    # decode_sums.cuh takes the maximum of scores before it multiplies them.
    jit.require(scale > 0, "decode_attention: scale is {}, must be greater than 0", scale)


# ---- by plan ----


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from decode_shapes.variants()
    yield from decode_prefixes.variants()
    yield from tiles_variants("attention/decode_split.cu", _split_shape, more=all_macros())


@functools.cache
def _device(index: int, dtype: torch.dtype, head_size: int) -> tuple[int, CtaShape]:
    """Return the number of CTAs, one for each SM, and their shape, for a cache of this dtype."""
    limit = jit.shared_memory_limit(index)
    shapes = decode_shapes.shapes(dtype, head_size)
    shape = next(s for s in shapes if s.shared_memory(dtype, head_size) <= limit)
    return jit.num_multiprocessors(index), shape


def _plan_size(num_sequences: int, num_ctas: int, num_warps: int, shares: bool = False) -> int:
    """Return the size of `Plan` in decode_plan.cuh, in int32."""
    arrivals = -(-num_ctas // 4) * 4
    start, sequence = (12, 4) if shares else (8, 2)
    return arrivals + num_ctas * (8 + start * num_warps) + sequence * (num_sequences + 2)


def _work(cache: Tensor, num_q_heads: int, num_ctas: int, shape: CtaShape) -> Work:
    """Describe the search for tokens that sequences share."""
    return Work.of(cache, num_q_heads, 16 * shape.warps, num_ctas)


@plan_decode.cuda
@flattened(PlanCall)
def _plan_decode(call: PlanCall) -> Tensor:
    lengths, cache, num_q_heads, window, block_tables, num_sinks, scores = call
    num_sequences, num_kv_heads = len(lengths), cache.shape[1]
    head_size = kv_format.head_size_of(cache)
    if not is_planned(cache.dtype, head_size) or num_sequences == 0:
        return torch.empty(0, dtype=torch.int32, device=lengths.device)
    jit.head_size_of(torch.float16, head_size)
    jit.require(lengths.is_contiguous(), "plan_decode: lengths must be contiguous")
    jit.require(
        num_sequences <= MOST_SEQUENCES, f"plan_decode: more than {MOST_SEQUENCES} sequences"
    )
    num_ctas, shape = _device(lengths.get_device(), cache.dtype, head_size)
    streams = num_sinks is not None
    case = Case(cache.dtype, cache.dtype, head_size, window > 0, streams, scores)
    may_share = 1 < num_sequences <= decode_prefixes.MAX_ROWS and no_sharing(case) is None
    shares = block_tables is not None and may_share
    size = own_size = _plan_size(num_sequences, num_ctas, shape.warps, shares)
    if shares:
        work = _work(cache, num_q_heads, num_ctas, shape)
        size += decode_prefixes.num_words(work, num_sequences)
    plan = torch.empty(size, dtype=torch.int32, device=lengths.device)
    if shares and block_tables is not None:
        find_prefixes(block_tables, lengths, plan[own_size:], work)
    parts = -(-(num_q_heads // num_kv_heads) // COLUMNS)
    jit.launch(
        plan_variant(tile_of(cache.dtype, head_size), window, shares, streams),
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
        _WHOLE_SHARE,
        window - (num_sinks or 0),
        num_sinks or 0,
        shared_memory=4 * (2 * num_sequences + num_ctas + 1),
    )
    return plan


@decode_attention.cuda
@flattened(DecodeCall)
def _decode_attention(call: DecodeCall) -> Tensor:
    q, cache, block_tables, lengths, plan, scale, out, newest, _, sinks, reads_step, _ = call
    _check_newest_of_step(newest, reads_step)
    check_layouts("decode_attention", q, cache, block_tables, lengths, plan)
    _check_scale(scale)
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
        "decode_attention: over a cache of {}, rope_and_cache comes before",
        cache.dtype,
    )
    if plan.shape[0] > 0 and q.dtype != torch.float32:
        _launch_by_plan(call, out)
    elif q.shape[0] > 0:
        jit.require(newest is None, "decode_attention: without a plan, q must be rotated")
        jit.require(sinks is None, "decode_attention: without a plan, sinks are sink_attention's")
        _launch_by_split(call, out)
    return out


def _streaming(
    q: Tensor, cache: Tensor, sinks: Sinks | None, window: int, scores: str
) -> tuple[int, Tensor | None]:
    """Return the number of sinks of each sequence and their angles, as the kernel takes them."""
    if sinks is None:
        return 0, None
    check_angles("decode_attention", sinks.angles, q.shape[2])
    is_window = 0 <= sinks.num_sinks < window
    jit.require(is_window, f"decode_attention: {sinks.num_sinks} sinks in a window of {window}")
    reason = no_sinks(Case(q.dtype, cache.dtype, q.shape[2], streams=True, scores=scores))
    jit.require(reason is None, "decode_attention: {}", reason)
    return sinks.num_sinks, sinks.angles


def _state_words(q: Tensor, cache: Tensor, plan_size: int, work: Work) -> int:
    """Return the words that hold sums of shared tokens; check the size of a plan that has such."""
    num_sequences, num_q_heads, head_size = q.shape
    num_ctas, shape = _device(q.get_device(), cache.dtype, head_size)
    size = _plan_size(num_sequences, num_ctas, shape.warps, shares=True)
    size += decode_prefixes.num_words(work, num_sequences)
    jit.require(plan_size == size, "decode_attention: the plan is of other sequences")
    return work.max_states(num_sequences) * num_q_heads * state_words(head_size)


def _launch_by_plan(call: DecodeCall, out: Tensor) -> None:
    q, cache, block_tables, lengths, plan, scale, _, newest, window, sinks, reads_step, own = call
    if newest is not None:
        check_newest("decode_attention", q, cache, newest)
    change = passed("decode_attention", q, own)
    num_sinks, angles = _streaming(q, cache, sinks, window, change.kind)
    k, v, cos_sin = newest or (q, q, q)  # q stands for what is not read
    num_sequences, num_q_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    num_ctas, shape = _device(q.get_device(), cache.dtype, head_size)
    plan_size = plan.shape[0]
    shares = plan_size != _plan_size(num_sequences, num_ctas, shape.warps)
    jit.require(not (shares and window), "decode_attention: the plan is of other sequences")
    num_words = num_ctas * 2 * part_words(head_size)
    if shares:
        num_words += _state_words(q, cache, plan_size, _work(cache, num_q_heads, num_ctas, shape))
    parts = torch.empty(num_words, dtype=torch.float32, device=q.device)
    jit.launch(
        attention_variant(
            q.dtype,
            head_size,
            shape,
            newest is not None,
            window,
            shares,
            cache.dtype,
            bool(sinks),
            change.kind,
        ),
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
        window - num_sinks,
        num_sinks,
        angles,
        change.cap,
        change.heads,
        shared_memory=shape.shared_memory(cache.dtype, head_size),
        overlaps=not reads_step,
    )


# ---- by split ----


def _split_shape(dtype: torch.dtype, head_size: int) -> TileShape:
    """Return the shape of a CTA of decode_split.cu: a warp for 16 tokens of a tile."""
    is_large = jit.has_large_heads(head_size)
    if dtype == torch.float32:
        return TileShape(1, 16, 2) if is_large else TileShape(2, 32, 2)
    return TileShape(2, 32, 3) if is_large else TileShape(4, 64, 3)


def _launch_by_split(call: DecodeCall, out: Tensor) -> None:
    q, cache, block_tables, lengths, window = *call[:4], call.window
    num_sequences, num_q_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    capacity = min(block_tables.shape[1] * block_size, window or _MOST_TOKENS)
    splits = max(1, min(_MAX_SPLITS, -(-capacity // _MIN_SPLIT)))
    size = num_sequences * num_q_heads * splits * (head_size + 2) if splits > 1 else 1
    partial = torch.empty(size, dtype=torch.float32, device=q.device)
    group_size = num_q_heads // num_kv_heads
    shape = _split_shape(q.dtype, head_size)
    stages = shape.stages_of(q, cache)
    kind, cap, heads = passed("decode_attention", q, call.changed)
    wanted = tiles_variant(
        "attention/decode_split.cu",
        q.dtype,
        head_size,
        shape,
        stages,
        window,
        cache.dtype,
        **macros(kind),
    )
    jit.launch(
        wanted,
        "decode_split",
        (splits, num_kv_heads * -(-group_size // 16), num_sequences),
        32 * shape.warps,
        q,
        q.stride(0),
        cache,
        block_tables,
        block_tables.stride(0),
        lengths,
        out,
        partial,
        call.scale * math.log2(math.e),
        num_kv_heads,
        group_size,
        jit.block_shift(block_size),
        window,
        cap,
        heads,
        shared_memory=shape.shared_memory(q.dtype, head_size, stages, cache.dtype),
    )
    if splits > 1:
        grid = (num_q_heads, num_sequences)
        jit.launch(wanted, "combine_splits", grid, head_size, partial, lengths, out, splits, window)
