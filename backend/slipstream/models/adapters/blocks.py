"""Read tensors of a file together, into one block of memory for each dtype.

Tensors that are multiplied by the same number lie side by side, so one operation scales all, one
rounds all, one looks whether all are finite, and one hashes all: each gives the interpreter's lock
away once. Memory that torch allocates for each tensor alone is touched in pages of 4 KB, which
takes four times as long as to copy the bytes; numpy asks for large pages where it allocates 4 MB
or more.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.adapters.memory import MEMORY
from slipstream.models.entries import TensorEntry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ALIGNMENT = 64  # bytes
_MOST_AT_ONCE = 512  # tensors that one call reads; Linux takes 1,024


class Wanted(NamedTuple):
    """A tensor to read; `scale`: what `finish` multiplies it by; `is_raw`: it leaves it alone."""

    entry: TensorEntry
    scale: float = 1.0
    is_raw: bool = False


class _Hash(Protocol):
    """A digest that is being made."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""


class Block:
    """Tensors of one dtype, those of the same scale side by side, with zeros between."""

    def __init__(self, wanted: Mapping[str, Wanted], is_raw: bool) -> None:
        """Make room for tensors, by any names."""
        self.is_raw = is_raw
        self._wanted = dict(sorted(wanted.items(), key=lambda item: item[1].scale))
        entries = [each.entry for each in self._wanted.values()]
        sizes = [_ALIGNMENT * max(1, -(-(e.end - e.begin) // _ALIGNMENT)) for e in entries]
        ends = list(accumulate(sizes, initial=0))
        memory = MEMORY.take(ends[-1])
        self._whole = memory.view(DTYPES[entries[0].dtype])
        self._firsts = [end // self._whole.element_size() for end in ends]
        self._bytes = bytes_of(memory)
        self._buffers: list[memoryview] = []  # of each tensor
        for begin, after, entry in zip(ends, ends[1:], entries, strict=False):
            end = begin + entry.end - entry.begin
            self._buffers.append(self._bytes[begin:end])
            self._bytes[end:after] = bytes(after - end)

    def places(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Yield where each tensor is, and where its bytes belong."""
        for each, buffer in zip(self._wanted.values(), self._buffers, strict=True):
            yield each.entry, buffer

    @property
    def described(self) -> tuple[object, ...]:
        """What the bytes of the block mean, but what tensors are multiplied by; it has a `repr` of
        its own.
        """
        tensors = [(name, each.entry.shape) for name, each in self._wanted.items()]
        return str(self._whole.dtype), self.is_raw, tensors

    def add_to(self, digest: "_Hash") -> None:
        """Hash what was read, before `finish`, without the interpreter's lock."""
        digest.update(self._bytes)

    def finish(self, dtype: torch.dtype) -> bool:
        """Multiply all by their scales and round them to a dtype; return whether all are finite."""
        spans: dict[float, tuple[int, int]] = {}
        for (begin, end), each in zip(pairwise(self._firsts), self._wanted.values(), strict=True):
            spans[each.scale] = spans.get(each.scale, (begin, end))[0], end
        whole = self._whole
        is_exact = whole.dtype in (dtype, torch.float32)  # else B must not be rounded twice
        if not is_exact:
            whole = whole.float()
        for scale, (begin, end) in spans.items():
            if scale != 1.0:
                whole[begin:end].mul_(scale)
        if whole.dtype != dtype:
            memory = MEMORY.take(len(whole) * dtype.itemsize)
            whole = memory.view(dtype).copy_(whole)
        self._whole = whole
        self._bytes, self._buffers = memoryview(b""), []  # of what is there no more
        return are_finite(whole)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all, which share the block's memory."""
        for first, (name, each) in zip(self._firsts, self._wanted.items(), strict=False):
            yield name, self._whole.as_strided(*_dense(each.entry.shape), first)


def bytes_of(memory: Tensor) -> memoryview:
    """Return the bytes of a tensor on the host, u8."""
    return memory.numpy().data


def are_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite: their sum, which is found sooner, mostly says it."""
    return bool(x.sum().isfinite()) or all(bool(end.isfinite()) for end in torch.aminmax(x))


def read_blocks(file: BinaryIO, wanted: Mapping[str, Wanted]) -> list[Block]:
    """Read tensors, by any names. Raises `CheckpointError` if the file became shorter."""
    kinds: dict[tuple[str, bool], dict[str, Wanted]] = defaultdict(dict)
    for name, each in wanted.items():
        kinds[each.entry.dtype, each.is_raw][name] = each
    blocks = [Block(own, is_raw) for (_, is_raw), own in kinds.items()]
    places = sorted(
        (place for block in blocks for place in block.places()), key=lambda place: place[0].begin
    )
    for begin, buffers in _runs(places):
        _fill(file, begin, buffers, places[0][0])
    return blocks


def _runs(
    places: Iterable[tuple[TensorEntry, memoryview]],
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield where bytes that follow each other in a file begin, and where they belong."""
    begin = end = 0
    buffers: list[memoryview] = []
    for entry, data in places:
        if buffers and (entry.begin != end or len(buffers) == _MOST_AT_ONCE):
            yield begin, buffers
            buffers = []
        if not buffers:
            begin = entry.begin
        buffers.append(data)
        end = entry.end
    if buffers:
        yield begin, buffers


def _fill(file: BinaryIO, begin: int, buffers: Sequence[memoryview], entry: TensorEntry) -> None:
    """Read what lies in a file from a byte on."""
    left = list(buffers)
    while left:
        count = os.preadv(file.fileno(), left, begin)
        if not count and any(left):
            raise CheckpointError(f"{entry.file}: it became shorter while it was read")
        begin += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def _dense(shape: Sequence[int]) -> tuple[Sequence[int], list[int]]:
    """Return a shape and the strides of a tensor without gaps."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return shape, strides
