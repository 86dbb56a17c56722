"""Attention on the processor, by the kernels in C++: all sequences in one call."""

import torch
from torch import Tensor

from slipstream.kernels.attention.decode import DecodeCall, decode_attention
from slipstream.kernels.attention.prefill import PrefillCall, prefill_attention
from slipstream.kernels.attention.rules import SINKING
from slipstream.kernels.attention.scores import Scores
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cpu.native import Sequences, address, loaded, num_threads
from slipstream.kernels.elementwise.rope_cpu import cache_struct, takes_heads
from slipstream.kernels.runtime.flat import flattened

MOST_GROUP = 128  # heads that share a kv head


def _takes(spec: tuple[tuple[object, ...], ...]) -> str | None:
    shape, cached = spec[0][0], spec[1][0]
    assert isinstance(shape, torch.Size)
    assert isinstance(cached, torch.Size)
    if shape[1] > MOST_GROUP * cached[1]:
        return f"takes {MOST_GROUP} heads of a kv head"
    return takes_heads(spec[0])


def takes_scores(changed: Scores, num_heads: int) -> bool:
    """Whether the kernel has these scores: plain ones, or those with sinks of fp32 `[hq]`."""
    if changed.changes not in ((), (SINKING,)):
        return False
    sinks = changed.sinks
    if sinks is None:
        return True
    is_vector = sinks.shape == (num_heads,) and sinks.is_contiguous()
    return is_vector and sinks.dtype == torch.float32


def _is_dense(q: Tensor, cache: Tensor, tables: Tensor, out: Tensor, *vectors: Tensor) -> bool:
    """Whether the kernel can read and write these by address."""
    are_rows = q.stride()[1:] == (q.shape[2], 1)
    have_tables = tables.stride(1) == 1 or tables.shape[1] <= 1
    return are_rows and have_tables and all(x.is_contiguous() for x in (cache, out, *vectors))


@decode_attention.implementation("C++", "cpu", takes=_takes, cost=0.5)
@flattened(DecodeCall)
def decode(call: DecodeCall) -> Tensor:
    """`decode_attention`; what the kernel does not take is computed by torch."""
    q, cache, tables, lengths, _, scale, out, newest, window, sinks, _, changed = call
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    is_plain = newest is None and sinks is None and scale > 0
    if (
        not is_plain
        or not takes_scores(changed, q.shape[1])
        or not _is_dense(q, cache, tables, out, lengths)
    ):
        return decode_attention.oracle(*call._replace(out=out))
    kv_format.check_cache("decode_attention", cache, q)
    count = len(lengths)
    where = tables.data_ptr(), tables.stride(0), lengths.data_ptr(), None, address(changed.sinks)
    _attend(q, cache, Sequences(*where, count, count, window, scale), out)
    return out


@prefill_attention.implementation("C++", "cpu", takes=_takes, cost=0.5)
@flattened(PrefillCall)
def prefill(call: PrefillCall) -> Tensor:
    """`prefill_attention`; what the kernel does not take is computed by torch."""
    q, cache, tables, starts, lengths, scale, _, out, window, _, changed, _ = call
    out = torch.zeros(q.shape, dtype=q.dtype) if out is None else out
    is_taken = takes_scores(changed, q.shape[1])
    if not is_taken or not _is_dense(q, cache, tables, out, starts, lengths):
        return prefill_attention.oracle(*call._replace(out=out))
    kv_format.check_cache("prefill_attention", cache, q)
    where = tables.data_ptr(), tables.stride(0), lengths.data_ptr(), starts.data_ptr()
    how = address(changed.sinks), len(lengths), 0, window, scale
    _attend(q, cache, Sequences(*where, *how), out)
    return out


def _attend(q: Tensor, cache: Tensor, sequences: Sequences, out: Tensor) -> None:
    of = q.data_ptr(), q.stride(0), len(q), q.shape[1]
    loaded().attend(sequences, cache_struct(cache), *of, out.data_ptr(), num_threads())
