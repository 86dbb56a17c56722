"""Read weights from safetensors or GGUF files.

A family asks for tensors by name; each is copied once, from its file into its place in the engine's
dtype on its device (stacked matrices are allocated whole and filled together).
"""

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream.errors import CheckpointError
from slipstream.layers.source import Stored
from slipstream.models.axes import Change, Moves, TensorNames
from slipstream.models.cuts import Cut, MatrixCut
from slipstream.models.entries import TensorEntry, unstacked
from slipstream.models.files import SINGLE, tensor_entries
from slipstream.models.gguf.kept import KEPT
from slipstream.models.gguf.part import fill_part
from slipstream.models.gguf.restore import buffer_for, restore
from slipstream.models.gguf.rows import BlockRows
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.mapped import MappedFiles
from slipstream.models.parts import Part
from slipstream.models.quantised import Matrices
from slipstream.models.reading import Region, TensorReader
from slipstream.models.spelling import HEAD, spelling_of, why_missing
from slipstream.quant.matrix import QuantMatrix

_log = logging.getLogger(__name__)
_DTYPES = {"F64": torch.float64, "F32": torch.float32}
_DTYPES |= {"F16": torch.float16, "BF16": torch.bfloat16}
_STORED = _DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
}
_MOST = 64  # exponent of the largest scale and of the inverse of the smallest: quotients stay exact


class _Checkpoint:
    """The tensors of a directory by the decoder's names, and which of them were read."""

    mapped_bytes = 0

    def __init__(self, directory: Path, tensors: TensorNames, single: str = SINGLE) -> None:
        self._directory = directory
        self._tensors = tensors
        self._entries = unstacked(
            tensor_entries(directory, single), tensors.stacked, tensors.turned
        )
        self._unread = set(self._entries)
        self._spelling = spelling_of(tensors, self._entries)
        self._matrices = Matrices(directory, tensors, self, self.stored(HEAD))
        self._notes: dict[str, int] = {}

    @property
    def directory(self) -> Path:
        """The checkpoint's."""
        return self._directory

    def entry(self, name: str) -> TensorEntry | None:
        """Return the place of a tensor by the checkpoint's name."""
        return self._entries.get(name)

    def like(self, name: str) -> Tensor:
        """Return the shape and dtype of a tensor as it is stored, by the checkpoint's name."""
        self._unread.discard(name)
        entry = self._entries[name]
        if entry.dtype in QUANTISED:  # rows of blocks
            shape = (entry.shape[0], (entry.end - entry.begin) // entry.shape[0])
            return torch.empty(shape, dtype=torch.uint8, device="meta")
        if entry.dtype not in _STORED:
            raise CheckpointError(f"{entry.file}: tensor {name} is {entry.dtype}: not implemented")
        return torch.empty(entry.shape, dtype=_STORED[entry.dtype], device="meta")

    def raw(self, name: str, region: tuple[slice, ...] = (), view: tuple[int, ...] = ()) -> Tensor:
        """Return a tensor as it is stored, or a region of it: its shape alone."""
        like = self.like(name).view(view) if view else self.like(name)
        return like[region] if region else like

    def raw_bytes(self, name: str) -> bytes:
        """Read a tensor's bytes, by the checkpoint's name."""
        self._unread.discard(name)
        return self.peek(name)

    def peek(self, name: str) -> bytes:
        """Read a tensor's bytes, by the checkpoint's name; it has still to be read."""
        entry = self._entries[name]
        with entry.file.open("rb") as file:
            file.seek(entry.begin)
            return file.read(entry.end - entry.begin)

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Read a matrix that the checkpoint has quantised, with all that belongs to it."""
        return self._matrices.read(name, self.stored(name), rows, inputs)

    def blocks(self, name: str, rows: int, inputs: int, region: tuple[slice, ...]) -> Tensor:
        """Read blocks of the matrix `name`, the decoder's name, of which a rank has so much."""
        self._take(f"{name}.weight", (rows, inputs))
        return self.raw(self.stored(f"{name}.weight"), region)

    def is_quantised(self, name: str) -> bool:
        """Return whether the checkpoint has the matrix quantised."""
        return self._matrices.is_quantised(self.stored(name))

    def is_in_blocks(self, name: str) -> bool:
        """Return whether the checkpoint has the matrix in blocks of a type that stays so."""
        return self._matrices.is_in_blocks(self.stored(name))

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor that is taken as its file has it; None: it is changed."""
        entry = self._entries.get(self.stored(name))
        if entry is None or entry.added or self._tensors.change(name) is not None:
            return None
        return _DTYPES.get(entry.dtype)

    def note(self, text: str) -> None:
        """Count what is said of matrices; `finish` logs it."""
        self._notes[text] = self._notes.get(text, 0) + 1

    def has(self, name: str) -> bool:
        """Return whether a file has the tensor."""
        return self.stored(name) in self._entries

    def check_scales(self, name: str, scales: Tensor) -> None:
        """Keep what is needed to check that values are finite; shapes alone need nothing."""

    def stored(self, name: str) -> str:
        """Return the name of a tensor of the decoder in this checkpoint."""
        return self._spelling.of(self._tensors.stored(name))

    def _take(self, name: str, shape: Sequence[int]) -> TensorEntry:
        """Return the tensor's place; raises `CheckpointError` if absent or of another shape."""
        cut = self._cut(name, shape)
        shape = shape if cut is None else cut.whole(shape)
        change, own, name = self._tensors.change(name), name, self.stored(name)
        entry = self._entries.get(name)
        if entry is None:
            why = why_missing(own, self.stored(HEAD), self._entries)
            raise CheckpointError(f"{self._directory}: tensor {name} is missing{why}")
        if _shape(entry, change) != tuple(shape):
            wanted = f"not {list(shape)}" if change is None else f"which gives no {list(shape)}"
            raise CheckpointError(
                f"{entry.file}: tensor {name} is {list(entry.shape)}, {wanted} "
                "as config.json (transformers' defaults where it is silent) has it"
            )
        if entry.dtype not in _DTYPES and entry.dtype not in QUANTISED:
            raise CheckpointError(f"{entry.file}: tensor {name} is {entry.dtype}: not implemented")
        self._unread.discard(name)
        return entry

    def _cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return the part of a tensor that this rank has in this shape; None: all of it."""
        cuts = self._tensors.cuts
        return None if cuts is None else cuts.of(name, shape)

    def pass_over(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Check names and shapes of tensors whose values are kept elsewhere."""
        for name, shape in zip(names, shapes, strict=True):
            self._take(name, shape)

    def mapped(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor | None:
        """Return None: there is nothing but shapes."""
        return None

    def stored_rows(self, name: str, rows: int, inputs: int, dtype: torch.dtype) -> Stored | None:
        """Return a matrix of blocks of which a scale for each makes values, if it is one."""
        stored = self.stored(f"{name}.weight")
        entry = self._entries.get(stored)
        if entry is None or entry.dtype not in KEPT or entry.paired_heads:
            return None
        cut = self._cut(f"{name}.weight", (rows, inputs))
        if cut is not None and cut.stored[1] < rows:  # zeros behind are not in the file
            return None
        self._take(f"{name}.weight", (rows, inputs))
        region = () if cut is None else (slice(cut.begin, cut.begin + rows),)
        own = replace(entry, shape=(rows, inputs))
        found = BlockRows(own, self.raw(stored, region), dtype)
        self.check_scales(stored, found.scales)
        return found

    def number(self, name: str) -> float:
        """Read the scale from a tensor of one element."""
        stored = self.stored(name)
        entry = self._entries.get(stored)
        if entry is not None and math.prod(entry.shape) != 1:
            raise CheckpointError(
                f"{entry.file}: tensor {stored} is {list(entry.shape)}: a scale is one number"
            )
        entry = self._take(name, entry.shape if entry else ())
        if entry.dtype in QUANTISED:
            raise CheckpointError(f"{entry.file}: tensor {stored} is {entry.dtype}: no scale is")
        number = bytearray(self.raw_bytes(stored))
        scale = torch.frombuffer(number, dtype=_DTYPES[entry.dtype]).float().item()
        if not 2.0**-_MOST <= scale <= 2.0**_MOST:
            raise CheckpointError(
                f"{entry.file}: tensor {stored} = {scale:g} is not a scale: a number of "
                f"2 ** -{_MOST} to 2 ** {_MOST}"
            )
        return scale

    def finish(self) -> None:
        """Raise `CheckpointError` if a tensor was never read and is not known to be unused."""
        may_be, plain = self._tensors.may_be_unread, self._spelling.plain
        left = sorted(n for n in self._unread if not may_be(n) and not may_be(plain(n)))
        if left:
            file = self._entries[left[0]].file
            raise CheckpointError(
                f"{file}: tensor {left[0]} (of {len(left)} such) has no place in this architecture"
            )


def _is_restored(entry: TensorEntry) -> bool:
    """Return whether values are made of what a GGUF file has."""
    return bool(entry.paired_heads or entry.added or entry.dtype in QUANTISED)


def _part(cut: Cut, shape: tuple[int, ...], moves: Moves | None) -> Part | None:
    """Return a part of a stored matrix; None: more is changed of it than its rows and inputs."""
    try:
        return Part(MatrixCut.of(cut), shape, moves) if cut.dim < 2 else None
    except RuntimeError:
        return None


def _shape(entry: TensorEntry, change: Change | None) -> tuple[int, ...] | None:
    """Return the shape of what is made of a stored tensor; None: nothing can be."""
    if change is None:
        return entry.shape
    try:
        return tuple(change(torch.empty(entry.shape, device="meta")).shape)
    except (RuntimeError, IndexError):  # a view of other sizes
        return None


class ShapeSource(_Checkpoint):
    """Checks the tensors of a checkpoint directory by name and shape; reads no data."""

    def fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Compare shapes with those of `outs`, which may be on torch's device `meta`."""
        for name, out in zip(names, outs, strict=True):
            self._take(name, out.shape)


class FileSource(_Checkpoint):
    """Reads the tensors of a checkpoint directory into tensors on `device`."""

    def __init__(
        self, directory: Path, device: torch.device, tensors: TensorNames, single: str = SINGLE
    ) -> None:
        super().__init__(directory, tensors, single)
        self._device = device
        self._reader = TensorReader(device)
        self._mapped = MappedFiles()
        self._extremes: list[Tensor] = []  # minimum and maximum of each tensor
        self._read: list[tuple[str, Path]] = []  # their names and files
        self._start = time.perf_counter()
        self._num_bytes = 0
        self._bar = tqdm(
            total=sum(entry.end - entry.begin for entry in self._entries.values()),
            desc="loading weights",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not sys.stderr.isatty(),
        )

    def raw(self, name: str, region: tuple[slice, ...] = (), view: tuple[int, ...] = ()) -> Tensor:
        """Read a tensor or a region of it, by the checkpoint's name; on a CPU it is mapped."""
        like, entry = self.like(name), self._entries[name]
        like = like.view(view) if view else like
        if region:
            out = self._mapped.region(name, entry, like, region).to(self._device)
        elif self._device.type == "cpu":
            out = self._mapped.tensor(name, entry, like.dtype, like.shape)
        else:
            out = torch.empty_like(like, device=self._device)
            self._reader.read([Region(name, entry.file, entry.begin, out.dtype)], [out])
        self._count(out.nbytes)
        return out

    def mapped(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor | None:
        """Return tensors as they lie in their file, if a CPU can compute with them there."""
        if self._device.type != "cpu" or self._tensors.cuts is not None:
            return None
        if any(not self._is_plain(name, dtype) for name in names):
            return None
        entries = [self._take(name, shape) for name, shape in zip(names, shapes, strict=True)]
        found = self._mapped.stacked(entries, names[0], dtype, shapes)
        if found is not None:
            self.mapped_bytes += found.nbytes
            parts = torch.split(found, [shape[0] for shape in shapes])
            for name, entry, part in zip(names, entries, parts, strict=True):
                self._note_values(self.stored(name), entry, part)
                self._count(entry.end - entry.begin)
        return found

    def stored_rows(self, name: str, rows: int, inputs: int, dtype: torch.dtype) -> Stored | None:
        """Return rows of a matrix of blocks that is mapped."""
        found = super().stored_rows(name, rows, inputs, dtype)
        if found is not None:
            entry = self._entries[self.stored(f"{name}.weight")]
            self.mapped_bytes += (entry.end - entry.begin) * rows // entry.shape[0]
        return found

    def _is_plain(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a tensor is stored as the decoder has it, in this dtype."""
        entry = self._entries.get(self.stored(name))
        is_same = entry is not None and _DTYPES.get(entry.dtype) == dtype
        is_moved = entry is not None and (entry.paired_heads or entry.added)
        return is_same and not is_moved and self._tensors.change(name) is None

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bar.update(num_bytes)

    def fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Copy the tensors into `outs`, converting their dtypes; change those that need it."""
        last: tuple[TensorEntry, Tensor] | None = None  # of which several of these may be made
        plain: list[tuple[str, Tensor]] = []
        for name, out in zip(names, outs, strict=True):
            change = self._tensors.change(name)
            if (cut := self._cut(name, out.shape)) is not None:
                self._fill_part(name, cut, change, out)
                continue
            if change is None:
                plain.append((name, out))
                continue
            entry, key = self._take(name, out.shape), self.stored(name)
            if last is None or last[0] != entry:
                last = entry, self._values(key, entry)
            out.copy_(change(last[1]))
            self._note_values(key, entry, out)
        if plain:
            self._fill(*zip(*plain, strict=True))

    def _values(self, key: str, entry: TensorEntry) -> Tensor:
        """Read a tensor as numbers, in fp32 where the file has its blocks, or other numbers."""
        if not _is_restored(entry):
            return self.raw(key)
        out = torch.empty(entry.shape, dtype=torch.float32, device=self._device)
        self._read_into([key], [entry], [out])
        return out

    def _fill_part(self, name: str, cut: Cut, change: Change | None, out: Tensor) -> None:
        """Copy a part of a tensor. Of rows and inputs that are moved only the part's are read.

        A bias is moved as the rows of its matrix are.
        """
        entry, key = self._take(name, out.shape), self.stored(name)
        moves = None if change is None else self._tensors.moves(name.removesuffix(".weight"))
        is_turned = moves is not None and moves.is_transposed
        part = None
        if change is None or moves is not None:
            part = _part(cut, entry.shape[::-1] if is_turned else entry.shape, moves)
        if not _is_restored(entry):
            dtype = _DTYPES[entry.dtype]
            if change is not None and part is not None:
                how = (part, is_turned, self._reader, out)
                num_bytes = self._mapped.fill_moved(key, entry, dtype, *how)
            else:
                num_bytes = self._mapped.fill(key, entry, dtype, cut, change, self._reader, out)
            self._count(num_bytes)
        elif part is not None:
            fill_part(entry, part, lambda region: self.raw(key, region), out)
        else:
            assert change is not None, "nothing else is no part"
            cut.fill(out, cut.part_of(change(self._values(key, entry))))
        self._note_values(key, entry, out)

    def check_scales(self, name: str, scales: Tensor) -> None:
        """Check them at the end with all others."""
        self._note_values(name, self._entries[name], scales)

    def _note_values(self, name: str, entry: TensorEntry, out: Tensor) -> None:
        """Keep the extremes: they are checked at the end, so that nothing waits for a GPU here."""
        self._extremes.append(torch.stack(torch.aminmax(out)))
        self._read.append((name, entry.file))

    def _fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Copy tensors that are as the decoder has them."""
        entries = [self._take(name, out.shape) for name, out in zip(names, outs, strict=True)]
        self._read_into([self.stored(name) for name in names], entries, outs)
        for name, entry, out in zip(names, entries, outs, strict=True):
            self._note_values(self.stored(name), entry, out)

    def _read_into(
        self, names: Sequence[str], entries: Sequence[TensorEntry], outs: Sequence[Tensor]
    ) -> None:
        """Read the values of tensors, by the checkpoint's names."""
        regions = [
            Region(name, entry.file, entry.begin, _DTYPES.get(entry.dtype, torch.uint8))
            for name, entry in zip(names, entries, strict=True)
        ]  # of blocks, their bytes
        buffers = [buffer_for(entry, out) for entry, out in zip(entries, outs, strict=True)]
        self._reader.read(regions, buffers)
        for entry, buffer, out in zip(entries, buffers, outs, strict=True):
            restore(entry, buffer, out)
            if entry.dtype in QUANTISED:
                dtype = str(out.dtype).removeprefix("torch.")
                self.note(f"tensors of {entry.dtype}: dequantised to {dtype} as they are loaded")
        self._count(sum(entry.end - entry.begin for entry in entries))

    def finish(self) -> None:
        """Refuse tensors that were never read and values that are not finite; log the speed."""
        self._bar.close()
        self._reader.close()
        super().finish()
        self._check_finite()
        for text, count in self._notes.items():
            _log.info("%s (%d)", text, count)
        seconds = time.perf_counter() - self._start
        size = self._num_bytes / 1e9
        _log.info("loaded %.2f GB in %.1f s (%.2f GB/s)", size, seconds, size / seconds)

    def _check_finite(self) -> None:
        if not self._extremes:
            return
        extremes = torch.stack(self._extremes)  # NaN shows in both
        for (name, file), is_finite in zip(
            self._read, extremes.isfinite().all(1).tolist(), strict=True
        ):
            if not is_finite:
                raise CheckpointError(
                    f"{file}: tensor {name} holds NaN, infinity or values beyond {extremes.dtype}"
                )
