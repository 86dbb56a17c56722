"""Attention that keeps the first tokens of a sequence and a window of the last (Xiao et al., 2023).

A cache of `window` tokens holds the sinks, the first `num_sinks` of the sequence, in front, and
its newest tokens behind them. A query and what it sees have the positions that they hold there.
Among the newest, rotated by their true positions, that makes no difference: rotation depends on
distances alone, and theirs are true. But sinks stay where they are while the sequence goes on; so
for them a query is turned further, to the position that it has in the cache.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.prefill import PrefillCall, SinkRows, launch_tiles, tiles_shape
from slipstream.kernels.cache.pages import (
    check_layouts,
    first_seen,
    gather,
    tiles_variants,
)
from slipstream.kernels.elementwise.rope import rotate
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.flat import flattened
from slipstream.kernels.runtime.op import op


class Sinks(NamedTuple):
    """Arguments of `decode_attention` for sequences that stream."""

    angles: Tensor  # [s, d] f32, as `sink_attention` has them
    num_sinks: int  # of each sequence, in its window


class SinkCall(NamedTuple):
    """Arguments of `sink_attention`."""

    q: Tensor  # [n, hq, d], rotated by `positions`
    angles: Tensor  # [n, d] f32: how much further for sinks; half cosines, half sines
    positions: Tensor  # [n] i64, in the sequence
    cache: Tensor  # [block, kv head, K or V, token in block, row]
    block_tables: Tensor  # [s, blocks] i32
    query_starts: Tensor  # [s + 1] i32: rows of q of each chunk
    lengths: Tensor  # [s] i32, of the tables
    scale: float  # of the scores
    max_queries: int  # of the longest chunk
    window: int  # tokens that a query sees, sinks included
    num_sinks: int
    out: Tensor | None = None  # like q; None: a new one


@op(
    "q[n,hq,d]:T, angles[n,d]:f32, positions[n]:i64, cache[_,h,2,_,_]:any, block_tables[s,_]:i32, "
    "query_starts[s1]:i32, lengths[s]:i32"
)
@flattened(SinkCall)
def sink_attention(call: SinkCall) -> Tensor:
    """Attention of rows `query_starts[s] : query_starts[s+1]` of q, the last of the `lengths[s]`
    tokens in the table of sequence s; `[n, hq, d]`.

    A query sees the table's first `num_sinks` tokens and the last `window - num_sinks` up to its
    own. Blocks between them, outside the window, may be missing. `q` is rotated
    by its `positions` in the sequence; half cosines, half sines of `angles` turn it further, by the
    position in the cache less that one. `max_queries` is the longest chunk. The result goes to
    `out` if given; rows of no chunk are undefined. A row's bits depend on its position and on what
    it sees alone.
    """
    q, angles, _, cache, block_tables, query_starts, lengths, scale = call[:8]
    window, num_sinks = call.window, call.num_sinks
    out = torch.empty_like(q) if call.out is None else call.out
    out.zero_()
    turned = rotate(q, *angles.unsqueeze(1).chunk(2, dim=-1)).to(q.dtype)
    bounds, num_kv_heads = query_starts.tolist(), cache.shape[1]
    for s, length in enumerate(lengths.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end or length == 0:
            continue
        places = torch.arange(length - (end - begin), length)
        # The window's first token of the first query; sinks are no part of it.
        first = max(num_sinks, first_seen(int(places[0]), window - num_sinks))
        sinks = min(num_sinks, length)
        parts = [gather(cache, block_tables[s], 0, sinks)]
        if first < length:
            parts.append(gather(cache, block_tables[s], first, length))
        k, v = (torch.cat(both, dim=1).float() for both in zip(*parts, strict=True))
        seen = torch.cat((torch.arange(sinks), torch.arange(first, max(first, length))))
        group = (num_kv_heads, -1, end - begin, q.shape[2])  # kv heads, their queries
        own, capped = (x[begin:end].float().transpose(0, 1).reshape(group) for x in (q, turned))
        scores = own @ k[:, None].transpose(2, 3)
        scores[..., :sinks] = capped @ k[:, None, :sinks].transpose(2, 3)
        is_near = seen > places[:, None] - (window - num_sinks)
        mask = (seen <= places[:, None]) & ((seen < num_sinks) | is_near)
        weights = (scores * scale).masked_fill(~mask, -torch.inf).softmax(-1)
        result = (weights @ v[:, None]).reshape(-1, end - begin, q.shape[2])
        out[begin:end] = result.transpose(0, 1).to(q.dtype)
    return out


def check_angles(op_name: str, angles: Tensor, head_size: int) -> None:
    """Raise `KernelError` unless they are as the kernels read them."""
    is_table = angles.dtype == torch.float32 and angles.shape[1] == head_size
    is_aligned = angles.is_contiguous() and angles.data_ptr() % 16 == 0
    jit.require(is_table and is_aligned, f"{op_name}: angles must be whole fp32 rows of a head")


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield from tiles_variants("attention/prefill.cu", tiles_shape, sinks=True)


@sink_attention.cuda
@flattened(SinkCall)
def _sink_attention(call: SinkCall) -> Tensor:
    q, angles, positions, cache, block_tables, query_starts, lengths = call[:7]
    scale, max_queries, window, num_sinks, out = call[7:]
    check_layouts("sink_attention", q, cache, block_tables, query_starts, lengths, positions)
    check_angles("sink_attention", angles, q.shape[2])
    is_window = 0 <= num_sinks < window
    jit.require(is_window, f"sink_attention: {num_sinks} sinks in a window of {window}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    is_like_q = out.shape == q.shape and out.dtype == q.dtype
    jit.require(is_like_q and out.is_contiguous(), "sink_attention: out must be like q")
    if out.numel() == 0 or len(lengths) == 0:
        return out
    where = (q, cache, block_tables, query_starts, lengths)
    chunks = PrefillCall(*where, scale, max_queries, window=window)
    launch_tiles(chunks, out, SinkRows(num_sinks, angles, positions))
    return out
