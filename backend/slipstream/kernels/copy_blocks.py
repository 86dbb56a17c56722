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
    """From where to where: bytes `[block, size]`, one tensor for each part of a block."""

    sources: tuple[Tensor, ...]
    destinations: tuple[Tensor, ...]
    table: Tensor  # for the device: addresses and strides in bytes, sizes in vectors, a row a part
    num_chunks: int  # of the largest part


def route(sources: Sequence[Tensor], destinations: Sequence[Tensor], device: torch.device) -> Route:
    """The way from block, the first dimension of every part, to block; on `device` copies run.

    Pinned host memory counts as the device's own: it must be registered with it, at one address for
    both. Raises `KernelError` where parts differ, or the device's vectors do not fit them.
    """
    jit.require(len(sources) == len(destinations), "copy_blocks: parts differ in number")
    rows = []
    from_, to = ([_bytes(part) for part in side] for side in (sources, destinations))
    for a, b in zip(from_, to, strict=True):
        size = a.shape[1]
        jit.require(size == b.shape[1], f"copy_blocks: parts of {size} and {b.shape[1]} bytes")
        row = (a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), size)
        is_aligned = not any(number % 16 for number in row)
        jit.require(
            is_aligned or device.type == "cpu", "copy_blocks: blocks must be aligned to 16 bytes"
        )
        rows.append((*row[:4], size // 16))
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    num_chunks = max(-(-row[4] // _CHUNK) for row in rows)
    return Route(tuple(from_), tuple(to), table, num_chunks)


def _bytes(part: Tensor) -> Tensor:
    """Its blocks as bytes, `[block, size]`, in place."""
    jit.require(part[0].is_contiguous(), "copy_blocks: a block must be contiguous")
    return part.flatten(1).view(torch.uint8)


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
