"""The one place where weights come from: safetensors files, or random numbers for benchmarks.

A family asks for tensors by name; each is copied once, from the mapped file into its place in the
engine's dtype on its device (packed matrices are allocated whole and filled piece by piece).
"""

import logging
import mmap
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream.errors import CheckpointError
from slipstream.models.files import TensorEntry, tensor_entries

_log = logging.getLogger(__name__)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Buffers that old checkpoints saved and that are computed from config.json.
_HARMLESS_LEFTOVERS = (".rotary_emb.inv_freq",)


class Source(Protocol):
    """Where the numbers come from."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    def fill(self, name: str, out: Tensor) -> None:
        """Write the tensor into `out`; `CheckpointError` if it is absent or of another shape."""

    def finish(self) -> None:
        """All is read: raises `CheckpointError` for what was not."""


class _Checkpoint:
    """What the files of a directory hold, and what of it was asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries = tensor_entries(directory)
        self._unread = set(self._entries)

    def has(self, name: str) -> bool:
        """Whether a file holds the tensor."""
        return name in self._entries

    def _take(self, name: str, shape: Sequence[int]) -> TensorEntry:
        """Where the tensor lies; `CheckpointError` if nowhere, or not as it is needed."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        if entry.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: tensor {name} is {list(entry.shape)}, not {list(shape)} "
                "as config.json has it"
            )
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{entry.file}: tensor {name} is {entry.dtype}: not implemented")
        self._unread.discard(name)
        return entry

    def finish(self) -> None:
        """Refuse tensors nobody asked for."""
        left = sorted(name for name in self._unread if not name.endswith(_HARMLESS_LEFTOVERS))
        if left:
            file = self._entries[left[0]].file
            raise CheckpointError(
                f"{file}: tensor {left[0]} (of {len(left)} such) has no place in this architecture"
            )


class ShapeSource(_Checkpoint):
    """The tensors of a checkpoint directory by name and shape; no number is read."""

    def fill(self, name: str, out: Tensor) -> None:
        """Look whether the tensor is as `out`, which may lie on torch's device `meta`."""
        self._take(name, out.shape)


class FileSource(_Checkpoint):
    """The tensors of a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._maps: dict[Path, mmap.mmap] = {}
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

    def fill(self, name: str, out: Tensor) -> None:
        """Copy the tensor into `out`, converting its dtype."""
        entry = self._take(name, out.shape)
        out.copy_(self._read(entry))
        if not bool(torch.stack(torch.aminmax(out)).isfinite().all()):  # NaN shows in both
            raise CheckpointError(
                f"{entry.file}: tensor {name} holds NaN, infinity or numbers beyond {out.dtype}"
            )
        self._num_bytes += entry.end - entry.begin
        self._bar.update(entry.end - entry.begin)

    def _read(self, entry: TensorEntry) -> Tensor:
        """The tensor as it lies in the mapped file."""
        dtype = _DTYPES[entry.dtype]
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                # Copy-on-write, because torch wants writable memory; nothing is ever written.
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = self._maps[entry.file]
        count = (entry.end - entry.begin) // dtype.itemsize
        if entry.begin % dtype.itemsize:
            flat = torch.frombuffer(bytearray(data[entry.begin : entry.end]), dtype=dtype)
        else:
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def finish(self) -> None:
        """Refuse tensors nobody asked for, and say how fast it went."""
        self._bar.close()
        self._maps.clear()
        super().finish()
        seconds = time.perf_counter() - self._start
        size = self._num_bytes / 1e9
        _log.info("loaded %.2f GB in %.1f s (%.2f GB/s)", size, seconds, size / seconds)


class RandomSource:
    """Seeded noise of any shape: norms near one, the rest as models are initialised."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        """Nothing optional is drawn."""
        return False

    def fill(self, name: str, out: Tensor) -> None:
        """Draw in place on the device."""
        is_norm = out.ndim == 1 and name.endswith(".weight")
        out.normal_(float(is_norm), 0.02, generator=self._generator)

    def finish(self) -> None:
        """Nothing can be left over."""
        _log.info("drew random weights")


class Weights:
    """A view of a source below a prefix: what layers are built from."""

    def __init__(
        self, source: Source, device: torch.device, dtype: torch.dtype, prefix: str = ""
    ) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype
        self._prefix = prefix

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self._device

    def at(self, prefix: str) -> "Weights":
        """The view below `prefix.`."""
        return Weights(self._source, self._device, self._dtype, f"{self._prefix}{prefix}.")

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return self._source.has(self._prefix + name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, which must have this shape."""
        return self.packed([name], shape[:1], *shape[1:])

    def packed(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> Tensor:
        """Tensors of shapes `[rows[i], *rest]` under one another, in one matrix."""
        out = torch.empty(sum(rows), *rest, dtype=self._dtype, device=self._device)
        for name, piece in zip(names, torch.split(out, list(rows)), strict=True):
            self._source.fill(self._prefix + name, piece)
        return out

    def finish(self) -> None:
        """Raise `CheckpointError` if the checkpoint holds a tensor that was never read."""
        self._source.finish()
