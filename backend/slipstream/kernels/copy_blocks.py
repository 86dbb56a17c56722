"""Copies of whole blocks: within the paged cache, or between it and pinned host memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import jit
from slipstream.kernels.op import op

_THREADS = 256
_CHUNK = _THREADS * 4  # vectors of 16 bytes
_WAVES = 8  # CTAs a multiprocessor, unless told


@dataclass(frozen=True, slots=True)
class Route:
    """From where to where: tensors whose first dimension is the block, one for each part of it."""

    sources: tuple[Tensor, ...]
    destinations: tuple[Tensor, ...]
    table: Tensor  # for the device: addresses and strides in bytes, sizes in vectors, a row a part
    num_chunks: int  # of the largest part


def route(sources: Sequence[Tensor], destinations: Sequence[Tensor], device: torch.device) -> Route:
    """The way from block to block, each contiguous in every part; on `device` the copies run.

    Pinned host memory counts as the device's own: it must be registered with it, at one address for
    both. Raises `KernelError` where parts differ, or the device's vectors do not fit them.
    """
    jit.require(len(sources) == len(destinations), "copy_blocks: parts differ in number")
    rows = []
    for a, b in zip(sources, destinations, strict=True):
        jit.require(a.shape[1:] == b.shape[1:], f"copy_blocks: {a.shape} to {b.shape}")
        jit.require(a.dtype == b.dtype, f"copy_blocks: {a.dtype} to {b.dtype}")
        is_whole = all(t.shape[0] == 0 or t[0].is_contiguous() for t in (a, b))
        jit.require(is_whole, "copy_blocks: a block must be contiguous")
        size = a[0].nbytes
        strides = [t.stride(0) * t.element_size() for t in (a, b)]
        is_aligned = not any(n % 16 for n in (size, *strides, a.data_ptr(), b.data_ptr()))
        jit.require(
            is_aligned or device.type == "cpu", "copy_blocks: blocks must be aligned to 16 bytes"
        )
        rows.append((a.data_ptr(), strides[0], b.data_ptr(), strides[1], size // 16))
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    num_chunks = max(-(-row[4] // _CHUNK) for row in rows)
    return Route(tuple(sources), tuple(destinations), table, num_chunks)


@op("pairs[n,2]:i32")
def copy_blocks(pairs: Tensor, way: Route, max_ctas: int = 0) -> None:
    """`destinations[p][b] = sources[p][a]` for each pair (a, b) and each part p.

    No block may be the destination of two pairs, or of one and the source of another: their order
    is not defined.

    Args:
        pairs: on the device on which the copies run.
        way: from where to where.
        max_ctas: how much of a GPU this may take; 0: all.
    """
    a, b = pairs.long().unbind(1)
    for source, destination in zip(way.sources, way.destinations, strict=True):
        destination[b] = source[a]


def _variant() -> jit.Variant:
    return jit.variant("copy_blocks.cu")


def variants() -> Iterator[jit.Variant]:
    """Every legal instantiation."""
    yield _variant()


@copy_blocks.cuda
def _copy_blocks(pairs: Tensor, way: Route, max_ctas: int = 0) -> None:
    jit.require(pairs.is_contiguous(), "copy_blocks: pairs must be contiguous")
    num_pairs, num_parts = len(pairs), len(way.table)
    num_items = num_pairs * num_parts * way.num_chunks
    if num_items == 0:
        return
    limit = max_ctas or _WAVES * jit.num_multiprocessors(pairs.device.index)
    args = (pairs, num_pairs, way.table, num_parts, way.num_chunks)
    jit.launch(_variant(), "copy_blocks", (min(num_items, limit),), _THREADS, *args)
