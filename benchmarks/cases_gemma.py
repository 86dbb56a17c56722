"""Attention at Gemma 3 4B's heads, 8 of queries and 4 of K and V, of 256 numbers: shuffled blocks.

`w`: with the window that most of its layers have.
"""

from collections.abc import Callable

import torch
from paged import paged, token_bytes
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.cache.kv_format import FORMATS
from timing import Result, measure, rows

Q_HEADS, KV_HEADS, HEAD_SIZE, WINDOW = 8, 4, 256, 1024
SCALE = HEAD_SIZE**-0.5


def cases() -> list[Result]:
    """Their times."""
    results = [decode(*mix) for mix in ((1, 8192), (16, 8192), (64, 1024))]
    results.append(decode(16, 8192, window=WINDOW))
    results += [decode(16, 8192, name) for name in FORMATS]
    results += [prefill(*mix) for mix in ((2048, 2048), (8192, 8192), (512, 8704), (64, 32832))]
    results += [prefill(*mix, window=WINDOW) for mix in ((2048, 2048), (8192, 8192))]
    return results + [prefill(2048, 2048, name) for name in FORMATS]


def label(case: str, name: str, window: int) -> str:
    return case + (f" {name}" if name in FORMATS else "") + (f" w {window}" if window else "")


def decode(count: int, length: int, name: str = "auto", window: int = 0) -> Result:
    """Sequences of one length, over a cache in this format; the limit counts what is seen."""

    def make() -> Callable[[], object]:
        q = rows(count, Q_HEADS, HEAD_SIZE)
        cache, tables, lengths = paged([length] * count, name, KV_HEADS, HEAD_SIZE)
        plan = plan_decode(lengths, cache, Q_HEADS, window)
        where = (cache, tables, lengths, plan, SCALE)
        return lambda: decode_attention(q, *where, window=window)

    seen = count * min(length, window or length)
    num_bytes = seen * token_bytes(name, KV_HEADS, HEAD_SIZE)
    case = label(f"{count} x {length}", name, window)
    return measure("decode_attention 256", case, make, num_bytes, 0)


def prefill(chunk: int, length: int, name: str = "auto", window: int = 0) -> Result:
    """The last `chunk` of so many tokens; the limit counts the pairs that are seen."""

    def make() -> Callable[[], object]:
        q = rows(chunk, Q_HEADS, HEAD_SIZE)
        cache, tables, lengths = paged([length], name, KV_HEADS, HEAD_SIZE)
        starts = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")
        where = (cache, tables, starts, lengths, SCALE, chunk)
        return lambda: prefill_attention(q, *where, window=window, splits=True)

    first = length - chunk
    pairs = sum(min(i + 1, window or length) for i in range(first, length))
    num_bytes = length * token_bytes(name, KV_HEADS, HEAD_SIZE) + chunk * Q_HEADS * HEAD_SIZE * 4
    case = label(f"{chunk} after {first}" if first else str(chunk), name, window)
    return measure("prefill_attention 256", case, make, num_bytes, 4 * pairs * Q_HEADS * HEAD_SIZE)
