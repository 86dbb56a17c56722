"""Prefill attention at Llama-3.1-8B's heads over shuffled blocks; cuDNN over dense tensors."""

from collections.abc import Callable

import torch
from paged import paged, token_bytes
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.cache.kv_format import FORMATS
from timing import HEAD_SIZE, KV_HEADS, Q_HEADS, Result, measure, rows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Mix = list[tuple[int, int]]  # (queries, tokens cached after them) of each sequence

MIXES: dict[str, Mix] = {
    "2048": [(2048, 2048)],
    "8192": [(8192, 8192)],
    "16384": [(16384, 16384)],
    "2 x 2048": [(2048, 2048)] * 2,
    "8 x 512": [(512, 512)] * 8,
    "512 after 8192": [(512, 8704)],
    "4 x 512 after 4096": [(512, 4608)] * 4,
    "16 after 8192": [(16, 8208)],
    "64 after 32768": [(64, 32832)],
    "256 after 32768": [(256, 33024)],
    "2048, 30 x 17": [(2048, 2048)] + [(17, 17)] * 30,
}


def over_pages(mix: Mix, name: str = "auto") -> Callable[[], object]:
    """One run of the kernel, over a cache in this format."""
    chunks = [chunk for chunk, _ in mix]
    q = rows(sum(chunks), Q_HEADS, HEAD_SIZE)
    cache, tables, lengths = paged([length for _, length in mix], name)
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32).cuda()
    scale = HEAD_SIZE**-0.5
    return lambda: prefill_attention(
        q, cache, tables, starts, lengths, scale, max(chunks), splits=True
    )


def dense(mix: Mix) -> Callable[[], object]:
    """One run of cuDNN's causal attention of sequences of one length, without a prefix."""
    chunk = mix[0][0]
    q = rows(len(mix), Q_HEADS, chunk, HEAD_SIZE)
    k, v = (rows(len(mix), KV_HEADS, chunk, HEAD_SIZE) for _ in range(2))

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def cases() -> list[Result]:
    """Their times; the rate counts the operations that the causal mask leaves."""
    results = []
    for case, mix in MIXES.items():
        ours = prefill(case, mix)
        results.append(ours)
        if len(set(mix)) == 1 and mix[0][0] == mix[0][1]:
            peer = measure("cuDNN, dense", case, lambda mix=mix: dense(mix), *sizes(mix))
            print(f"{case}: {ours.teraflops / peer.teraflops:.3f} of cuDNN's rate", flush=True)
            results.append(peer)
    few = ("2048", "512 after 8192")
    return results + [prefill(case, MIXES[case], name) for case in few for name in FORMATS]


def sizes(mix: Mix, name: str = "auto") -> tuple[float, float]:
    """Bytes and operations."""
    pairs = sum(chunk * (length - chunk) + chunk * (chunk + 1) / 2 for chunk, length in mix)
    cached = sum(length for _, length in mix) * token_bytes(name)
    num_rows = sum(chunk for chunk, _ in mix) * Q_HEADS
    return cached + num_rows * HEAD_SIZE * 4, 4 * pairs * Q_HEADS * HEAD_SIZE


def prefill(case: str, mix: Mix, name: str = "auto") -> Result:
    """Over a cache in this format."""
    label = case if name == "auto" else f"{case} {name}"
    return measure("prefill_attention", label, lambda: over_pages(mix, name), *sizes(mix, name))
