"""Tensors of files that are mapped into memory: what is used is read, and nothing twice.

A processor computes with them where they lie, if their dtype and order are the engine's. A rank
reads only its own bytes: rows as whole tensors are read, those that are moved too; what is cut
otherwise is mapped, and what is copied of it is read.
"""

import mmap
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.axes import Change, EachRow
from slipstream.models.cuts import Cut
from slipstream.models.entries import TensorEntry
from slipstream.models.parts import Part, Span
from slipstream.models.reading import Region, TensorReader


class MappedFiles:
    """The files of a checkpoint, each mapped once, privately: nothing writes to them."""

    def __init__(self) -> None:
        self._files: dict[Path, mmap.mmap] = {}

    def stacked(
        self,
        entries: Sequence[TensorEntry],
        name: str,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
    ) -> Tensor | None:
        """Return tensors that lie behind one another as one; None where they do not.

        Raises `CheckpointError`.
        """
        first = entries[0]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        follows = all(
            one.end == other.begin and one.file == other.file for one, other in pairwise(entries)
        )
        if not follows or first.begin % dtype.itemsize or prod(shape) == 0:
            return None
        return self.tensor(name, replace(first, end=entries[-1].end), dtype, shape)

    def fill(
        self,
        name: str,
        entry: TensorEntry,
        dtype: torch.dtype,
        cut: Cut,
        change: Change | None,
        reader: TensorReader,
        out: Tensor,
    ) -> int:
        """Write a part of the tensor `name` into `out`; return the bytes that it has of the file.

        `change` comes before `cut`. Raises `CheckpointError`.
        """
        begin, count = cut.stored
        part = count * prod(entry.shape) // cut.total * dtype.itemsize
        spans = [Span(begin, begin + count)]
        if cut.dim == 0 and change is None:
            self._rows(name, entry, dtype, spans, reader, out[:count])
            out[count:].zero_()
        elif cut.dim == 0 and isinstance(change, EachRow):
            values = out.new_empty((count, *entry.shape[1:]), dtype=dtype)
            self._rows(name, entry, dtype, spans, reader, values)
            cut.fill(out, change(values))
        else:
            values = self.tensor(name, entry, dtype, entry.shape)
            cut.fill(out, cut.part_of(values if change is None else change(values)))
            part = part if change is None else values.nbytes
        return part

    def fill_moved(
        self,
        name: str,
        entry: TensorEntry,
        dtype: torch.dtype,
        part: Part,
        is_transposed: bool,
        reader: TensorReader,
        out: Tensor,
    ) -> int:
        """Write a part of a matrix whose rows and inputs are moved; as `fill`."""
        window = part.window((1, 1)) or part.all()
        if window.dim == 0 and not is_transposed:
            values = out.new_empty((window.size, *entry.shape[1:]), dtype=dtype)
            self._rows(name, entry, dtype, window.spans, reader, values)
        else:
            stored = self.tensor(name, entry, dtype, entry.shape)
            stored = stored.t() if is_transposed else stored
            own = window.sizes(*stored.shape)
            values = window.read(own, stored.shape, lambda region: stored[region])
        part.fill(out, values, window)
        return values.nbytes

    def _rows(
        self,
        name: str,
        entry: TensorEntry,
        dtype: torch.dtype,
        spans: Sequence[Span],
        reader: TensorReader,
        out: Tensor,
    ) -> None:
        """Read some rows of a tensor; raises `CheckpointError`."""
        row_bytes = prod(entry.shape[1:]) * dtype.itemsize
        regions = [
            Region(name, entry.file, entry.begin + begin * row_bytes, dtype) for begin, _ in spans
        ]
        reader.read(regions, torch.split(out, [end - begin for begin, end in spans]))

    def region(
        self, name: str, entry: TensorEntry, like: Tensor, region: tuple[slice, ...]
    ) -> Tensor:
        """Return a region of a tensor like `like`; of rows, nothing is read."""
        shape = (*like.shape[:-1], like.shape[-1] * like.itemsize)
        own = (*region, *[slice(None)] * (like.ndim - len(region)))
        last = own[-1]
        if last.start is not None:
            last = slice(last.start * like.itemsize, last.stop * like.itemsize)
        values = self.tensor(name, entry, torch.uint8, shape)[(*own[:-1], last)]
        return values.contiguous().view(like.dtype)

    def tensor(
        self, name: str, entry: TensorEntry, dtype: torch.dtype, shape: Sequence[int]
    ) -> Tensor:
        """Return the stored tensor on the CPU, of which nothing is read yet.

        Raises `CheckpointError` if the file is shorter than its header says.
        """
        if entry.file not in self._files:
            with entry.file.open("rb") as file:
                self._files[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        memory = self._files[entry.file]
        if len(memory) < entry.end:
            raise CheckpointError(
                f"{entry.file}: truncated: tensor {name} ends at byte {entry.end}, "
                f"the file at {len(memory)}"
            )
        count = prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(tuple(shape))
