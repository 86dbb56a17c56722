"""Copies of whole blocks within the paged cache."""

from collections.abc import Iterator

from torch import Tensor

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_THREADS = 256
_CHUNK = _THREADS * 4  # vectors of 16 bytes
_WAVES = 8  # CTAs a multiprocessor


@op("pairs[n,2]:i32")
def copy_blocks(pairs: Tensor, cache: Tensor) -> None:
    """`cache[:, b] = cache[:, a]` for each pair (a, b).

    No block may be the destination of two pairs, or of one and the source of another: their order
    is not defined.

    Args:
        pairs: of blocks.
        cache: `[part, block, ...]`, a part for each layer, or several; contiguous.
    """
    a, b = pairs.long().unbind(1)
    cache[:, b] = cache[:, a]


def _variant() -> jit.Variant:
    return jit.variant("cache/copy_blocks.cu")


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield _variant()


@copy_blocks.cuda
def _copy_blocks(pairs: Tensor, cache: Tensor) -> None:
    jit.require(pairs.is_contiguous(), "copy_blocks: pairs must be contiguous")
    jit.require(cache.is_contiguous(), "copy_blocks: cache must be contiguous")
    num_parts, num_blocks = cache.shape[:2]
    num_bytes = cache[0, 0].nbytes
    is_aligned = num_bytes % 16 == 0 and cache.data_ptr() % 16 == 0
    jit.require(is_aligned, f"copy_blocks: parts of {num_bytes} bytes are not aligned to 16")
    size = num_bytes // 16
    num_items = len(pairs) * num_parts * -(-size // _CHUNK)
    if num_items == 0:
        return
    grid = (min(num_items, _WAVES * jit.num_multiprocessors(pairs.device.index)),)
    args = (pairs, len(pairs), cache, num_parts, num_blocks, size)
    jit.launch(_variant(), "copy_blocks", grid, _THREADS, *args)
