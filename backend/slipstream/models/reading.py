"""Bytes of files into tensors: several threads read pieces, and a GPU takes them meanwhile.

One thread copies from the page cache at a fraction of what memory or PCIe can do. So the pieces of
a tensor are read by several; on their way to a GPU they pass pinned buffers, two a thread: one is
read into while the other is copied from. Every piece costs some Python, during which no other
thread gets on: few large ones are better than many, as long as all threads have one.
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

PIECE_BYTES = 16 << 20  # of a file, at most
_LEAST_BYTES = 1 << 20  # smaller ones cross PCIe at half its speed
_MAX_THREADS = 8  # what one GPU's PCIe takes; more only wait for each other
_ALIGNMENT = 4096  # bytes: no number lies in two pieces, no page is read twice


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor in a file: row-major elements of `dtype` from byte `begin` on."""

    name: str  # for errors
    file: Path
    begin: int
    dtype: torch.dtype


class _Piece(NamedTuple):
    region: Region
    begin: int  # in the file
    out: Tensor  # flat


class _Buffer:
    """Host memory on the way to elsewhere."""

    def __init__(self, is_pinned: bool) -> None:
        self._bytes = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self.memory = self._bytes.numpy().data
        self.copied: torch.cuda.Event | None = None  # until then a copy may read it
        if is_pinned:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def elements(self, count: int, dtype: torch.dtype) -> Tensor:
        """The first of the buffer."""
        return self._bytes[: count * dtype.itemsize].view(dtype)


def num_threads() -> int:
    """How many read at once: as many as this process has processors, up to a limit."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


class TensorReader:
    """Reads regions of files into tensors of one device; `close` it."""

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
        """What each thread has of its own."""
        self._local.mode = torch.inference_mode()  # the tensors may be made in it
        self._local.mode.__enter__()
        is_pinned = self._stream is not None
        self._local.buffers = [_Buffer(is_pinned) for _ in range(2 if is_pinned else 1)]
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def read(self, regions: Sequence[Region], outs: Sequence[Tensor]) -> None:
        """Fill contiguous tensors, each from its region, converting dtypes.

        On a GPU the numbers are there for what the current stream does from now on. Raises
        `CheckpointError` if a file cannot be read or ends too early.
        """
        pairs = list(zip(regions, outs, strict=True))
        num_bytes = sum(out.numel() * region.dtype.itemsize for region, out in pairs)
        # Every thread gets one: the call waits for the last of them.
        size = min(max(num_bytes // self._threads, _LEAST_BYTES), PIECE_BYTES)
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        pieces = [piece for pair in pairs for piece in self._pieces(*pair, size)]
        with self._ordered():
            for _ in self._pool.map(self._read, pieces):
                pass

    def close(self) -> None:
        """Let go of threads and files."""
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
        """Between what the current stream did (with the memory, before) and what it does next."""
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
        numbers = buffer.elements(len(out), region.dtype)
        if buffer.copied is None:
            out.copy_(numbers)
            return
        if out.dtype != region.dtype:
            # Converted there: a copy that converts does so on the host, and waits.
            numbers = numbers.to(self._device, non_blocking=True)
        out.copy_(numbers, non_blocking=True)
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
