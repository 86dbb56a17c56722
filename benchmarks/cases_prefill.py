"""Prefill attention at Llama-3.1-8B's heads, over shuffled blocks."""

from collections.abc import Callable

import torch
from paged import paged
from slipstream.kernels.prefill_attention import prefill_attention
from timing import HEAD_SIZE, KV_HEADS, Q_HEADS, Result, measure, rows


def cases() -> list[Result]:
    """Their times."""
    mixes = {
        "2048": [(2048, 2048)],
        "8192": [(8192, 8192)],
        "16384": [(16384, 16384)],
        "8 x 512": [(512, 512)] * 8,
        "512 after 8192": [(512, 8704)],
        "4 x 512 after 4096": [(512, 4608)] * 4,
    }
    results = []
    for case, sequences in mixes.items():
        chunks = [chunk for chunk, _ in sequences]

        def make(
            sequences: list[tuple[int, int]] = sequences, chunks: list[int] = chunks
        ) -> Callable[[], object]:
            q = rows(sum(chunks), Q_HEADS, HEAD_SIZE)
            cache, tables, lengths = paged([length for _, length in sequences])
            starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32).cuda()
            scale = HEAD_SIZE**-0.5
            return lambda: prefill_attention(q, cache, tables, starts, lengths, scale, max(chunks))

        pairs = sum(
            chunk * (length - chunk) + chunk * (chunk + 1) / 2 for chunk, length in sequences
        )
        num_bytes = sum(length * KV_HEADS + chunk * Q_HEADS for chunk, length in sequences)
        flops = 4 * pairs * Q_HEADS * HEAD_SIZE
        results.append(measure("prefill_attention", case, make, num_bytes * HEAD_SIZE * 4, flops))
    return results
