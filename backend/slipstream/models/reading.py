"""Read tensors from files: several threads read pieces while a GPU copies others.

One thread copies from the page cache at a fraction of the speed of memory or PCIe. So several
threads read the pieces of a tensor. On their way to a GPU pieces go through pinned buffers, two per
thread: one is read into while the other is copied from. Every piece costs some Python, during which
other threads wait: few large pieces are better than many, as long as all threads have one.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import CheckpointError

PIECE_BYTES = 16 << 20  # largest piece of a file
_LEAST_BYTES = 1 << 20  # smaller pieces cross PCIe at half its speed
_MAX_THREADS = 8  # enough for the PCIe of one GPU
_ALIGNMENT = 4096  # bytes: no element is split, no page is read twice


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor in a file: row-major elements of `dtype` from byte `begin` on."""

    name: str  # for error messages
    file: Path
    begin: int
    dtype: torch.dtype


class _Piece(NamedTuple):
    region: Region
    begin: int  # in the file
    out: Tensor  # flat


class _Buffer:
    """A host buffer of `PIECE_BYTES` bytes, pinned for a GPU."""

    def __init__(self, is_pinned: bool) -> None:
        self._bytes = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self.memory = self._bytes.numpy().data
        self.copied: torch.cuda.Event | None = None  # a copy may read the buffer until then
        if is_pinned:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def elements(self, count: int, dtype: torch.dtype) -> Tensor:
        """View the first `count` elements of the buffer, flat, as `dtype`."""
        return self._bytes[: count * dtype.itemsize].view(dtype)


def num_threads() -> int:
    """Return the number of reading threads: one per core of this process, at most 8."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


class TensorReader:
    """Reads regions of files into tensors of one device. Call `close` at the end."""

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self._device = device
        self._files: dict[Path, int] = {}
        self._threads = threads or num_threads()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(self._threads, "weights", self._enter_thread)

    def _enter_thread(self) -> None:
        """Set up a thread: inference mode, its buffers, the copy stream."""
        self._local.mode = torch.inference_mode()  # tensors made in it can only be written in it
        self._local.mode.__enter__()
        is_pinned = self._stream is not None
        self._local.buffers = [_Buffer(is_pinned) for _ in range(2 if is_pinned else 1)]
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def read(self, regions: Sequence[Region], outs: Sequence[Tensor]) -> None:
        """Fill contiguous tensors, each from its region, converting dtypes.

        On a GPU, later work of the current stream sees the values. Raises
        `CheckpointError` if a file cannot be read or ends too early.
        """
        pairs = list(zip(regions, outs, strict=True))
        num_bytes = sum(out.numel() * region.dtype.itemsize for region, out in pairs)
        # Every thread gets a piece: the call waits for the last one.
        size = min(max(num_bytes // self._threads, _LEAST_BYTES), PIECE_BYTES)
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        pieces = [piece for pair in pairs for piece in self._pieces(*pair, size)]
        with self._ordered():
            for _ in self._pool.map(self._read, pieces):
                pass

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _pieces(self, region: Region, out: Tensor, size: int) -> Iterator[_Piece]:
        if region.file not in self._files:
            self._files[region.file] = os.open(region.file, os.O_RDONLY)
        flat, step = out.view(-1), size // region.dtype.itemsize
        for first in range(0, len(flat), step):
            begin = region.begin + first * region.dtype.itemsize
            yield _Piece(region, begin, flat[first : first + step])

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Order copies after earlier and before later work of the current stream."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        yield
        current.wait_stream(self._stream)

    def _read(self, piece: _Piece) -> None:
        region, out = piece.region, piece.out
        if self._stream is None and out.dtype == region.dtype:
            self._fill(piece, out.view(torch.uint8).numpy().data)
            return
        buffers: list[_Buffer] = self._local.buffers
        buffer = buffers.pop(0)
        buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        self._fill(piece, buffer.memory[: len(out) * region.dtype.itemsize])
        values = buffer.elements(len(out), region.dtype)
        if buffer.copied is None:
            out.copy_(values)
            return
        if out.dtype != region.dtype:
            # Convert on the GPU: a copy that converts does so on the host, and blocks.
            values = values.to(self._device, non_blocking=True)
        out.copy_(values, non_blocking=True)
        buffer.copied.record()

    def _fill(self, piece: _Piece, memory: memoryview) -> None:
        """Read until `memory` is full."""
        region, done = piece.region, 0
        descriptor = self._files[region.file]
        while done < len(memory):
            try:
                count = os.preadv(descriptor, [memory[done:]], piece.begin + done)
            except OSError as error:
                raise CheckpointError(
                    f"{region.file}: tensor {region.name} cannot be read: {error.strerror}"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{region.file}: truncated: tensor {region.name} ends at byte "
                    f"{piece.begin + done}"
                )
            done += count
