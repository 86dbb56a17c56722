"""Find the tensors of a checkpoint directory: in safetensors headers, or in a GGUF file. No torch.

A directory that `gguf/unpack.py` wrote has a reference to its GGUF file, `gguf.json`. A safetensors
file is an 8-byte little-endian header length, a JSON header, then the data. Offsets are checked
against the file's size before data is read, so the error for a truncated download names the file.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeGuard

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.tensors import REFERENCE, referenced_entries
from slipstream.models.lfs import check_fetched

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_ITEM_SIZES |= {"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file of the checkpoint; raises `CheckpointError`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json(data, path)


def parse_json(text: bytes, path: Path) -> dict[str, object]:
    """Return the JSON object that a file holds; raises `CheckpointError`, which names the file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not {clip(data)}")
    return data


def _weight_files(directory: Path, single: str) -> list[Path]:
    """Return the safetensors files of the checkpoint: the single one, or the index's shards."""
    if single == SINGLE and (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / INDEX}: weight_map is missing or empty")
        names = set(weight_map.values())
        for name in names:
            if not isinstance(name, str) or not name or Path(name).name != name:
                raise CheckpointError(f"{directory / INDEX}: {clip(name)} is not a file name")
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory / name}: {_absent(directory / name)}")
        return [directory / name for name in sorted(names)]
    if (directory / single).is_file():
        return [directory / single]
    raise without_weights(directory, single)


def _absent(path: Path) -> str:
    """Say why a file that should be there is none; links alone are there of a copied cache."""
    if path.is_symlink():
        return f"is a link to {path.readlink()}, where no file is"
    return f"no such file, but {INDEX} names it"


def without_weights(directory: Path, single: str, shown: Path | None = None) -> CheckpointError:
    """Return the error of a directory without the file `single`: what it has in its place.

    `shown`: the directory's name in the error, if `directory` is not what a person calls it.
    """
    name = directory if shown is None else shown
    if (directory / single).is_symlink():
        return CheckpointError(f"{name / single}: {_absent(directory / single)}")
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs:
        return CheckpointError(f"{name}: only GGUF; name the file, {name / ggufs[0].name}")
    pickles = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*"))
    if pickles:
        return CheckpointError(
            f"{name}: only pickled weights ({pickles[0].name}): `slipstream convert` "
            "makes safetensors of them"
        )
    return CheckpointError(f"{name}: has neither {single} nor {INDEX}")


def _entry(path: Path, name: str, spec: object, data_start: int, size: int) -> TensorEntry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {clip(name)}: {what}")

    if not isinstance(spec, dict):
        raise wrong(f"header entry {clip(spec)} is not an object")
    dtype, shape, offsets = spec.get("dtype"), spec.get("shape"), spec.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise wrong(f"dtype {clip(dtype)} is not known")
    if not _are_sizes(shape) or not _are_sizes(offsets):
        raise wrong(f"shape {clip(shape)} or offsets {clip(offsets)} are wrong")
    num_bytes = math.prod(shape) * _ITEM_SIZES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise wrong(f"{num_bytes} bytes do not lie at offsets {clip(offsets)}")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if end > size:
        raise CheckpointError(f"{path}: truncated: {name} ends at byte {end}, the file at {size}")
    return TensorEntry(path, dtype, tuple(shape), begin, end)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    """Return whether a value of JSON is a list of whole numbers from 0 on."""
    if not isinstance(values, list):
        return False
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _read_header(path: Path) -> dict[str, TensorEntry]:
    with path.open("rb") as file:
        return header_entries(file, path)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raises `ValueError` for a key that it has twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{clip(twice, 128)} is there more than once")
    return found


def header_entries(
    file: BinaryIO,
    path: Path,
    most: int = _MAX_HEADER,
    turn: Callable[[], None] = lambda: None,
) -> dict[str, TensorEntry]:
    """Return the tensors of an open safetensors file by name; raises `CheckpointError`.

    `most`: bytes of its header. `turn` is called for each tensor, as it is parsed and as it is
    checked: by it a thread beside others gives the interpreter's lock away.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        turn()
        return _unique(pairs)

    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    check_fetched(path, start)
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{path}: truncated or not safetensors: header of {length} bytes in {size}"
        )
    if length > most:
        raise CheckpointError(f"{path}: its header has {length} bytes, at most {most} are read")
    text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, TensorEntry] = {}
    for name, spec in header.items():
        turn()
        entries[name] = _entry(path, name, spec, 8 + length, size)
    at, last = 8 + length, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < at:
            raise CheckpointError(f"{path}: tensors {name} and {last} overlap")
        if entry.begin > at:
            raise CheckpointError(f"{path}: bytes {at} to {entry.begin} belong to no tensor")
        at, last = entry.end, name
    if at < size:
        raise CheckpointError(f"{path}: bytes {at} to {size}, its end, belong to no tensor")
    return entries


def tensor_entries(directory: Path, single: str = SINGLE) -> dict[str, TensorEntry]:
    """Return all tensors by name; raises `CheckpointError` for a missing or damaged file.

    A checkpoint that is not in shards is the one file `single`.
    """
    if single == SINGLE and (directory / REFERENCE).is_file():
        return referenced_entries(directory, read_json(directory / REFERENCE))
    entries: dict[str, TensorEntry] = {}
    for path in _weight_files(directory, single):
        for name, entry in _read_header(path).items():
            if name in entries:
                raise CheckpointError(f"{path}: tensor {name} is also in {entries[name].file.name}")
            entries[name] = entry
    if single == SINGLE and (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX)["weight_map"]
        assert isinstance(weight_map, dict)
        for name, file in weight_map.items():
            if name not in entries or entries[name].file.name != file:
                raise CheckpointError(f"{directory / file}: no tensor {name}, but {INDEX} says so")
    return entries
