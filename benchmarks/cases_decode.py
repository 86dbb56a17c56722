"""Decode attention at Llama-3.1-8B's heads, over shuffled blocks."""

from collections.abc import Callable

from paged import paged
from slipstream.kernels.decode_attention import decode_attention, plan_decode
from timing import HEAD_SIZE, KV_HEADS, Q_HEADS, Result, measure, rows


def cases() -> list[Result]:
    """Their times."""
    mixes = {
        "1 x 256": [256],
        "1 x 4096": [4096],
        "1 x 32768": [32768],
        "1 x 131072": [131072],
        "16 x 16384": [16384] * 16,
        "32 x 384": [384] * 32,
        "128 x 384": [384] * 128,
        "256 x 384": [384] * 256,
        "256 x 1100": [1100] * 256,
        "1 x 32768 + 200 x 300": [32768] + [300] * 200,
    }
    results = []
    for case, lengths in mixes.items():

        def make(lengths: list[int] = lengths) -> Callable[[], object]:
            q = rows(len(lengths), Q_HEADS, HEAD_SIZE)
            cache, tables, lens = paged(lengths)
            plan = plan_decode(lens, cache, Q_HEADS)
            return lambda: decode_attention(q, cache, tables, lens, plan, HEAD_SIZE**-0.5)

        tokens = sum(lengths)
        num_bytes = tokens * KV_HEADS * HEAD_SIZE * 4
        results.append(measure("decode_attention", case, make, num_bytes, 0))
    return results
