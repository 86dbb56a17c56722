"""Decode attention at Llama-3.1-8B's heads, over shuffled blocks."""

from collections.abc import Callable

from paged import paged, token_bytes
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.cache.kv_format import FORMATS
from timing import HEAD_SIZE, Q_HEADS, Result, measure, rows


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
    results = [decode(case, lengths) for case, lengths in mixes.items()]
    few = ("16 x 16384", "256 x 384")
    return results + [decode(case, mixes[case], name) for case in few for name in FORMATS]


def decode(case: str, lengths: list[int], name: str = "auto") -> Result:
    """Over a cache in this format; the limit counts its bytes."""

    def make() -> Callable[[], object]:
        q = rows(len(lengths), Q_HEADS, HEAD_SIZE)
        cache, tables, lens = paged(lengths, name)
        plan = plan_decode(lens, cache, Q_HEADS)
        return lambda: decode_attention(q, cache, tables, lens, plan, HEAD_SIZE**-0.5)

    label = case if name == "auto" else f"{case} {name}"
    return measure("decode_attention", label, make, sum(lengths) * token_bytes(name), 0)
