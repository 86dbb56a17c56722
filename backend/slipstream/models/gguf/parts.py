"""Read a GGUF file that is in parts, as llama.cpp's `gguf-split` writes them, as if it were one.

The parts lie in one folder and are named `NAME-00001-of-00003.gguf`. The first has the metadata;
each says which it is (`split.no`, from 0), of how many (`split.count`), and how many tensors all of
them have (`split.tensors.count`).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slipstream_contract.errors import clip

from slipstream.errors import CheckpointError
from slipstream.models.gguf.file import GgufFile, GgufTensor, read_part

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL | re.IGNORECASE)
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, or those of all its parts if `path` is the first of several.

    Raises `CheckpointError` for what is missing, damaged or not GGUF, and for parts that do not
    belong together.
    """
    first = read_part(path)
    count = first.metadata.get(_COUNT, 0)
    if count in (0, 1):
        return first
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: {_COUNT} = {clip(count)}, but the file is not named as one of so many parts: "
            "NAME-00001-of-00003.gguf"
        )
    count = int(match[3])
    if first.metadata.get(_NUMBER) != 0 or int(match[2]) != 1:
        name = path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
        raise CheckpointError(f"{path}: not the first of {count} parts: name that, {name}")
    parts = [first]
    for number in range(1, count):
        part = read_part(path.with_name(f"{match[1]}-{number + 1:05}-of-{match[3]}.gguf"))
        for key, expected in ((_COUNT, count), (_NUMBER, number)):
            if part.metadata.get(key) != expected:
                found = clip(part.metadata.get(key))
                raise CheckpointError(f"{part.path}: {key} = {found}, not {expected}")
        parts.append(part)
    digests = "".join(part.digest for part in parts)
    return replace(
        first,
        num_bytes=sum(part.num_bytes for part in parts),
        digest=hashlib.sha256(digests.encode()).hexdigest(),
        tensors=_joined(first, parts),
    )


def _joined(first: GgufFile, parts: list[GgufFile]) -> Mapping[str, GgufTensor]:
    """Return the tensors of all parts; refuse one that two have, and another number of them."""
    found: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in found:
                other = found[name].path
                raise CheckpointError(f"{part.path}: tensor {clip(name)} is in {other}, too")
            found[name] = tensor
    expected = first.metadata.get(_TENSORS, len(found))
    if expected != len(found):
        raise CheckpointError(
            f"{first.path}: {_TENSORS} = {clip(expected)}, but its parts have {len(found)}"
        )
    return found
