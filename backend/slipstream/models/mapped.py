"""Read parts of tensors of files: a rank reads only its own bytes.

Rows are read as whole tensors are. Of what is cut otherwise, or moved by a change, files are mapped
into memory, and what is copied is read: a change that does not copy by itself costs nothing.
"""

import mmap
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.axes import Change
from slipstream.models.cuts import Cut
from slipstream.models.entries import TensorEntry
from slipstream.models.reading import Region, TensorReader


class MappedFiles:
    """The files of a checkpoint, each mapped once, privately: nothing writes to them."""

    def __init__(self) -> None:
        self._files: dict[Path, mmap.mmap] = {}

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
        if change is None and cut.dim == 0:
            begin, count = cut.stored
            row_bytes = prod(entry.shape[1:]) * dtype.itemsize
            region = Region(name, entry.file, entry.begin + begin * row_bytes, dtype)
            reader.read([region], [out[:count]])
            out[count:].zero_()
        else:
            values = self._tensor(name, entry, dtype)
            cut.fill(out, cut.part_of(values if change is None else change(values)))
        return cut.stored[1] * prod(entry.shape) // cut.total * dtype.itemsize

    def _tensor(self, name: str, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
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
        count = prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.begin).view(
            entry.shape
        )
