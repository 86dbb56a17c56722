"""Rules of the attention kernels: why a kernel does not take a case, or None.

The launchers choose by these rules, `AttentionBackend.supports` refuses by them, and the table in
docs/attention.md is made from them. What a rule says of a call, the sources say by `static_assert`:
a wrong rule does not compile.
"""

import functools
from typing import NamedTuple

import torch

from slipstream.kernels.cache import kv_format
from slipstream.kernels.runtime import jit

WGMMA_HEAD_SIZES = (64, 128, 256)
# Of latents, and of the keys beside them that rotate.
LATENT_SIZES = ((512, 64),)
# What becomes of scores before the softmax: scores.py.
PLAIN, CAPPED, SLOPED, SINKING = "plain scores", "capped scores", "ALiBi", "sinks in the softmax"


class Case(NamedTuple):
    """Inputs of the rules; the same for every step of a layer."""

    dtype: torch.dtype  # of queries, keys and values
    cached: torch.dtype  # of the cache
    head_size: int
    has_window: bool = False  # queries see the newest tokens only
    streams: bool = False  # and, turned further, the first ones: sinks.py
    scores: str = PLAIN

    @property
    def is_quantized(self) -> bool:
        """Whether the cache has fewer bits than what is computed with."""
        return self.cached in kv_format.FORMATS.values()


@functools.cache
def no_kernel(case: Case) -> str | None:
    """Why no kernel attends at all, or None."""
    if case.head_size not in jit.HEAD_SIZES:
        sizes = ", ".join(map(str, jit.HEAD_SIZES))
        return f"only {sizes} have kernels"
    return None


@functools.cache
def no_decode_plan(case: Case) -> str | None:
    """Why decodes are not by plan (decode.cu) but by split (decode_split.cu), or None."""
    if torch.float32 in (case.dtype, case.cached):
        return "float32"
    if case.cached == torch.uint8 and case.head_size % kv_format.GROUP:
        return f"int4 heads that are no multiple of {kv_format.GROUP}"
    return None


@functools.cache
def no_sharing(case: Case) -> str | None:
    """Why tokens that several sequences share are read by each of them, or None."""
    if case.cached not in (torch.float16, torch.bfloat16):
        return "a cache that is not of 16 bits"
    if case.has_window:
        return "a window hides what sequences share"
    if case.scores in (CAPPED, SLOPED):
        return f"{case.scores}: the tiles of several sequences have none"
    if jit.has_large_heads(case.head_size):
        return "two tiles of 64 tokens of wide heads do not fit the rings"
    return None


@functools.cache
def no_rotation(case: Case) -> str | None:
    """Why decodes are not rotated and cached by their attention kernel, or None."""
    if case.dtype != case.cached:
        return "a quantised cache is written by rope.cu alone"
    if case.dtype == torch.float32:
        return "float32"
    return None


@functools.cache
def no_sinks(case: Case) -> str | None:
    """Why no kernel turns queries further for sinks, or None."""
    if case.is_quantized:
        return "queries over a quantised cache are not turned"
    if jit.has_large_heads(case.head_size):
        return f"no sinks of heads of {case.head_size}"
    if case.scores != PLAIN:
        return f"no sinks of sequences beside {case.scores}"
    return None


@functools.cache
def no_wgmma(case: Case) -> str | None:
    """Why chunks are not prefill_wgmma.cu's but prefill.cu's on a Hopper GPU, or None."""
    if case.dtype == torch.float32:
        return "float32"
    if case.head_size not in WGMMA_HEAD_SIZES:
        return f"heads of {case.head_size}"
    if case.has_window:
        return "a window"
    if case.scores != PLAIN:
        return case.scores
    return "a quantised cache" if case.is_quantized else None


@functools.cache
def no_parts(case: Case) -> str | None:
    """Why a chunk is not cut into parts for several multiprocessors, or None."""
    if jit.has_large_heads(case.head_size):
        return f"no variant cuts chunks of heads of {case.head_size}"
    return no_wgmma(case)


@functools.cache
def no_unpacking(case: Case) -> str | None:
    """Why chunks never read blocks that were unpacked for them to 16 bits, or None."""
    if not case.is_quantized:
        return "nothing is packed"
    if case.dtype == torch.float32:
        return "float32"
    return "queries are turned further for sinks" if case.streams else None


@functools.cache
def no_latents(case: Case, rank: int) -> str | None:
    """Why no kernel attends over latents of `rank` numbers, in rows of two heads, or None."""
    if case.is_quantized:
        return "a cache of latents has the dtype of activations"
    sizes = (rank, 2 * case.head_size - rank)
    if sizes not in LATENT_SIZES:
        known = ", ".join(f"{latent} and {rotated}" for latent, rotated in LATENT_SIZES)
        return f"latents of {sizes[0]} and keys of {sizes[1]} have no kernels; {known} have"
    return None
