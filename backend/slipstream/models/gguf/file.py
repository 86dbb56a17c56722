"""Read the header of a GGUF file: metadata, and the place of every tensor. No torch.

A file is a magic number, a version, two counts, the metadata (key, type, value), the tensors'
names, shapes, types and offsets, then the data (ggml/docs/gguf.md). Every count is compared with
the bytes that are left before anything is made of that size, and every tensor with the size of the
file. The package `gguf` has a reader, too; it makes array objects of each token and merge (2.6 s
for 49,152 tokens, where this takes 0.12 s), and counts that lie keep it busy for ever.
"""

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.gguf.types import BLOCK_TYPES, BlockType, name_of
from slipstream.models.lfs import check_fetched

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # bytes; `general.alignment` changes it
_MAX_DIMS = 4
_MAX_HEADER = 1 << 30  # bytes
_STRING, _ARRAY = 8, 9
# Number of a metadata type -> struct's letter and bytes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_SIZES = {number: struct.calcsize(letter) for number, letter in _SCALARS.items()}
_LEAST = _SIZES | {_STRING: 8}  # bytes that an element of an array has at least


class GgufTensor(NamedTuple):
    """The place of a tensor: bytes `begin .. end` of `path`, row-major blocks of `type`."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]  # the slowest dimension first, as in torch
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What the header of a file says; for a file in parts, what all their headers say.

    Attributes:
        path: of the file, or of the first part.
        num_bytes: of all parts.
        digest: sha256 of the header; of several: of their digests.
        metadata: of the file, or of the first part: key -> bool, int, float, str or a list of them.
        tensors: of all parts.
    """

    path: Path
    num_bytes: int
    digest: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_part(path: Path) -> GgufFile:
    """Read the header of one file.

    Raises `CheckpointError` for one that is missing, damaged or not GGUF.
    """
    try:
        found = os.stat(path)
        return _read(path, found.st_size, found.st_mtime_ns)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


@lru_cache(maxsize=16)
def _read(path: Path, size: int, modified_ns: int) -> GgufFile:
    """Read a file once, as long as it does not change."""
    with path.open("rb") as file:
        header = _Header(path, file, size)
        num_tensors, num_keys = header.start()
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = header.text("a key of the metadata")
            if key in metadata:
                raise header.wrong(f"key {clip(key)} is there twice")
            metadata[key] = header.value(header.number("I"), key)
        places = header.places(num_tensors)
        tensors = _tensors(header, places, _alignment(header, metadata))
        return GgufFile(path, size, header.digest, metadata, tensors)


class _Place(NamedTuple):
    """A tensor as the header has it: `offset` counts from the start of the data."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int


class _Header:
    """Reads values one after the other; every error names the file and what was read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self._file = file
        self._left = min(size, _MAX_HEADER)
        self._hash = hashlib.sha256()
        self.size = size
        self.position = 0

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of what was read."""
        return self._hash.hexdigest()

    def wrong(self, what: str) -> CheckpointError:
        """Return an error that names the file."""
        return CheckpointError(f"{self.path}: {what}")

    def start(self) -> tuple[int, int]:
        """Read what a file starts with; return its numbers of tensors and of keys."""
        magic = self._take(4, "the header") if self._left >= 24 else b""
        if magic != MAGIC:
            check_fetched(self.path, magic)
            raise self.wrong(f"not a GGUF file of {self.size} bytes: it must start with GGUF")
        version = self.number("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            swapped = " (big-endian files are not served)" if version >> 16 else ""
            raise self.wrong(f"GGUF version {version} is not served; {known} are{swapped}")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        self._check_room(num_tensors, 24, "tensors")
        self._check_room(num_keys, 13, "keys")
        return num_tensors, num_keys

    def number(self, letter: str, what: str = "the header") -> int:
        """Read a number of struct's type `letter`."""
        number: int = struct.unpack(f"<{letter}", self._take(struct.calcsize(letter), what))[0]
        return number

    def text(self, what: str) -> str:
        """Read a string: its length, then UTF-8."""
        data = self._take(self.number("Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8: {clip(data)}") from None

    def value(self, number: int, key: str) -> object:
        """Read a value of metadata type `number`."""
        what = f"the value of {clip(key)}"
        if number == _STRING:
            return self.text(what)
        if number != _ARRAY:
            return self._scalars(number, 1, what)[0]
        kind, count = self.number("I", what), self.number("Q", what)
        if kind not in _LEAST:
            raise self.wrong(f"{what} is an array of type {kind}, which is not served")
        self._check_room(count, _LEAST[kind], f"elements of {what}")
        if kind == _STRING:
            return [self.text(what) for _ in range(count)]
        return list(self._scalars(kind, count, what))

    def places(self, count: int) -> dict[str, _Place]:
        """Read what the header says of the tensors."""
        found: dict[str, _Place] = {}
        for _ in range(count):
            name = self.text("the name of a tensor")
            if name in found:
                raise self.wrong(f"tensor {clip(name)} is there twice")
            found[name] = self._place(clip(name))
        return found

    def _place(self, name: str) -> _Place:
        what = f"tensor {name}"
        num_dims = self.number("I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.wrong(f"{what} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, what))
        number, offset = self.number("I", what), self.number("Q", what)
        if number not in BLOCK_TYPES:
            known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
            raise self.wrong(f"{what} is {name_of(number)}, which is not served; {known} are")
        kind = BLOCK_TYPES[number]
        if 0 in dims or dims[0] % kind.elements:
            raise self.wrong(
                f"{what} is {kind.name} with rows of {dims[0]} values, not of whole blocks of "
                f"{kind.elements}: {list(reversed(dims))}"
            )
        return _Place(kind, tuple(reversed(dims)), offset)

    def _scalars(self, number: int, count: int, what: str) -> tuple[object, ...]:
        if number not in _SCALARS:
            raise self.wrong(f"{what} has type {number}, which GGUF does not have")
        letter = _SCALARS[number]
        data = self._take(count * _SIZES[number], what)
        if letter == "?" and max(data, default=0) > 1:
            raise self.wrong(f"{what} is {max(data)}, neither true nor false")
        return struct.unpack(f"<{count}{letter}", data)

    def _check_room(self, count: int, least: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold."""
        if count * least > self._left:
            raise self.wrong(f"truncated or damaged: {count} {what} in {self._left} bytes")

    def _take(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise self.wrong(
                f"truncated or damaged: {what} has {count} bytes at byte {self.position}, "
                f"of {self.size}"
            )
        data = self._file.read(count)
        if len(data) < count:
            raise self.wrong(f"truncated: {what} ends at byte {self.position + len(data)}")
        self._left -= count
        self.position += count
        self._hash.update(data)
        return data


def _alignment(header: _Header, metadata: Mapping[str, object]) -> int:
    """Return the bytes of which tensors start at multiples."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    is_power = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
    if not is_power or int(str(alignment)) > 1 << 20:
        raise header.wrong(f"general.alignment = {clip(alignment)} is not a power of two")
    return int(str(alignment))


def _tensors(
    header: _Header, places: Mapping[str, _Place], alignment: int
) -> dict[str, GgufTensor]:
    """Check that all tensors lie in the file, and none on another."""
    start = -(-header.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, (kind, shape, offset) in places.items():
        begin = start + offset
        end = begin + math.prod(shape) // kind.elements * kind.num_bytes
        if offset % alignment:
            raise header.wrong(f"tensor {clip(name)} is at {offset}, no multiple of {alignment}")
        if end > header.size:
            raise header.wrong(
                f"truncated: tensor {clip(name)} ends at byte {end}, the file at {header.size}"
            )
        tensors[name] = GgufTensor(header.path, kind, shape, begin, end)
    at, last = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < at:
            raise header.wrong(f"tensors {clip(name)} and {clip(last)} overlap")
        at, last = tensor.end, name
    return tensors
