"""Packed weights kept on disk: what a start made of 16 bits, the next one maps.

A file is one model's. Behind its head (magic, length of an index, digest of the index) lie an index
in JSON and, from multiples of 64 bytes on, tensors. Each matrix has a digest, which is compared
before it is used: what is damaged is made again. Files are replaced whole, so engines may start
at once, and one that has a file mapped keeps it when another replaces or deletes it.
"""

import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from slipstream import __version__
from slipstream.kernels.gemm.cpu_packing import LAYOUT
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import Groups, Packing
from slipstream.kernels.runtime import disk_cache

_log = logging.getLogger(__name__)
_MAGIC = b"SLPACK01"
_ALIGNED = 64
_DIGEST = 32  # bytes of a SHA-256
_HEAD = len(_MAGIC) + 8 + _DIGEST
_MOST = 32 << 30  # bytes of all such files together
_DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.float16)}
_DTYPES |= {"bfloat16": torch.bfloat16, "uint8": torch.uint8}
_PARTS = ("values", "scales", "minimums")  # of a matrix
_MAKERS = ("quant", "kernels/gemm", "models")  # folders of the code that makes the bytes


def path_of(files: Iterable[Path], what: Sequence[str]) -> Path:
    """Return where weights made of these files are kept, `what` being all else they depend on.

    Files differ by place, size, inode and times of change, which a rewrite always moves.
    Raises OSError where a file is missing.
    """
    digest = hashlib.sha256(repr((__version__, str(torch.__version__), tuple(what))).encode())
    for path in sorted(files):
        is_at, stat = path.resolve(), path.stat()
        marks = (stat.st_size, stat.st_ino, stat.st_dev, stat.st_mtime_ns, stat.st_ctime_ns)
        digest.update(repr((str(is_at), marks)).encode())
    package = Path(__file__).parent.parent
    for folder in _MAKERS:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return disk_cache.folder("packed") / f"{digest.hexdigest()[:32]}.weights"


class PackedStore:
    """The packed weights of one model: those kept before, and those made at this start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._index: dict[str, Any] = {}
        self._used: dict[str, Matrix] = {}
        self._num_made = 0
        self.mapped_bytes = 0  # of matrices that lie in the file
        try:
            self._open()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._index = {}
            _log.warning("packed weights in %s cannot be used and are made again: %s", path, error)

    def _open(self) -> None:
        with self._path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(memory[len(_MAGIC) : len(_MAGIC) + 8], "little")
        text = memory[_HEAD : _HEAD + length]
        if memory[: len(_MAGIC)] != _MAGIC or _digest(text) != memory[_HEAD - _DIGEST : _HEAD]:
            raise ValueError("its index is damaged")
        index = json.loads(text)
        if len(memory) != index["size"]:
            raise ValueError(f"it has {len(memory)} bytes of {index['size']}")
        self._memory, self._index = memory, index["matrices"]
        try:
            os.utime(self._path)  # the oldest are deleted first
        except OSError:  # a disk that is only read
            _log.debug("%s: its time cannot be set", self._path)

    def take(self, name: str, outputs: int, inputs: int) -> Matrix | None:
        """Return the matrix `[outputs, inputs]` as it lies in the file; None: make it."""
        entry = self._index.get(name)
        if entry is None or self._memory is None:
            return None
        begin, end = entry["begin"], entry["end"]
        with memoryview(self._memory) as whole, whole[begin:end] as data:
            is_sound = _digest(data).hex() == entry["digest"]
        sizes = entry["packing"]["outputs"], entry["packing"]["inputs"]
        if not is_sound or sizes != (outputs, inputs):
            _log.warning("packed weights of %s in %s are damaged: made again", name, self._path)
            return None
        scale = _DTYPES[entry["packing"]["scale"]]
        packing = Packing(**{**entry["packing"], "scale": scale})
        parts = {part: self._tensor(**each) for part, each in entry["parts"].items()}
        groups = Groups(packing, parts["scales"], minimums=parts.get("minimums"))
        found = Matrix(parts["values"], groups=groups)
        self._used[name] = found
        self.mapped_bytes += end - begin
        return found

    def _tensor(self, begin: int, shape: Sequence[int], dtype: str) -> Tensor:
        assert self._memory is not None, "an index was read from it"
        like = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=begin)
        return flat.view(like.shape)

    def keep(self, name: str, matrix: object) -> None:
        """Keep a matrix that was made, if it is in the form of the processor's kernels."""
        if isinstance(matrix, Matrix) and _is_kept(matrix):
            self._used[name] = matrix
            self._num_made += 1

    def finish(self) -> None:
        """Write the file if something was made; log what was done. A full disk is no fault."""
        if not self._num_made:
            if self._used:
                size = self.mapped_bytes / 1e9
                _log.info("packed weights of %.2f GB are those in %s", size, self._path)
            return
        index, pieces, size = _laid_out(self._used)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(self._path.parent, size)
            with disk_cache.replacing(self._path) as file:
                _write_to(file, index, pieces)
        except OSError as error:
            reason = error.strerror or str(error)
            _log.info("packed weights are not kept: %s: %s", self._path.parent, reason)
        else:
            _log.info("packed weights of %.2f GB are kept in %s", size / 1e9, self._path)


def _is_kept(matrix: Matrix) -> bool:
    groups = matrix.groups
    if groups is None or groups.packing.layout != LAYOUT or not groups.is_plain:
        return False
    return groups.zeros is None and matrix.scales is None


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _laid_out(matrices: dict[str, Matrix]) -> tuple[bytes, list[tuple[int, Tensor]], int]:
    """Return the index, tensors with where they begin, and the size of the file."""
    index: dict[str, Any] = {}
    pieces: list[tuple[int, Tensor]] = []
    first = at = _rounded_up(_HEAD + _index_room(matrices))
    for name, matrix in matrices.items():
        groups = matrix.groups
        assert groups is not None, "what is kept is packed"
        digest, parts, begin = hashlib.sha256(), {}, at
        for part, tensor in zip(
            _PARTS, (matrix.values, groups.scales, groups.minimums), strict=True
        ):
            if tensor is None:
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts[part] = {"begin": at, "shape": list(tensor.shape), "dtype": dtype}
            pieces.append((at, tensor))
            digest.update(_bytes_of(tensor))
            padding = _rounded_up(tensor.nbytes) - tensor.nbytes
            digest.update(bytes(padding))
            at += tensor.nbytes + padding
        packing = groups.packing._asdict()
        packing["scale"] = str(packing["scale"]).removeprefix("torch.")
        index[name] = {"begin": begin, "end": at, "digest": digest.hexdigest()}
        index[name] |= {"parts": parts, "packing": packing}
    text = json.dumps({"size": at, "matrices": index}).encode()
    assert _HEAD + len(text) <= first, "the index has its room"
    return text, pieces, at


def _index_room(matrices: dict[str, Matrix]) -> int:
    """Return bytes that the index certainly fits into."""
    return 64 + sum(1024 + 6 * len(name) for name in matrices)


def _rounded_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _make_room(folder: Path, size: int) -> None:
    """Delete what was used longest ago; raises OSError where there is no room for `size` bytes."""
    if size > _MOST:
        raise OSError(f"{size / 1e9:.1f} GB are more than the {_MOST / 1e9:.0f} GB of all")
    found = []
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:  # another start deleted it
            continue
        found.append((stat.st_mtime_ns, stat.st_size, path))
    total = size + sum(each for _, each, _ in found)
    for _, each, path in sorted(found):
        if total <= _MOST:
            break
        path.unlink(missing_ok=True)
        total -= each
    if shutil.disk_usage(folder).free < 2 * size:
        raise OSError(f"the disk has less than twice the {size / 1e9:.2f} GB free")


def _write_to(file: IO[bytes], index: bytes, pieces: Sequence[tuple[int, Tensor]]) -> None:
    file.write(_MAGIC + len(index).to_bytes(8, "little") + _digest(index) + index)
    for begin, tensor in pieces:
        file.write(bytes(begin - file.tell()))
        file.write(_bytes_of(tensor))
    file.write(bytes(_rounded_up(file.tell()) - file.tell()))
