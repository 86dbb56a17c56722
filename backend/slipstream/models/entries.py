"""Define where a tensor lies, and how it is stored. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor: bytes `begin .. end` of `file`, row-major.

    A reader undoes `paired_heads` and `added`, so that a layer sees the values of a Hugging Face
    checkpoint.
    """

    file: Path
    dtype: str  # the format's name: F32, BF16, ..., or a type of GGUF's blocks: Q4_0, Q6_K, ...
    shape: tuple[int, ...]
    begin: int
    end: int
    paired_heads: int = 0  # rows are of so many heads, in each the two that rotate side by side
    added: float = 0.0  # to every value


def unstacked(
    entries: Mapping[str, TensorEntry],
    stacked: Mapping[str, Sequence[str]],
    turned: Mapping[str, Sequence[str]],
) -> dict[str, TensorEntry]:
    """Return the tensors, of which those that are several under one another are apart.

    Those that are several side by side have all of an expert's each, `[inputs, rows]`.
    stacked, turned: as of `TensorNames`. A tensor whose shape has no such parts stays as it is.
    """
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        beside = next((each for each in turned if name.endswith(f".{each}")), None)
        if beside is not None and len(entry.shape) == 3:
            for each in turned[beside]:
                found |= _parts(name.removesuffix(beside), entry, [each])
            continue
        end = next((each for each in stacked if name.endswith(f".{each}")), None)
        if end is None or len(entry.shape) not in (2, 3) or entry.shape[-2] % len(stacked[end]):
            found[name] = entry
        else:
            found |= _parts(name.removesuffix(end), entry, stacked[end])
    return found


def _parts(stem: str, entry: TensorEntry, ends: Sequence[str]) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the parts of a tensor of each expert, or of the one that it is, by their names."""
    *counts, rows, inputs = entry.shape
    count = counts[0] if counts else 1
    size = (entry.end - entry.begin) // max(count * len(ends), 1)
    for i in range(count * len(ends)):
        begin = entry.begin + i * size
        shape, name = (rows // len(ends), inputs), ends[i % len(ends)].format(i // len(ends))
        yield f"{stem}{name}", replace(entry, shape=shape, begin=begin, end=begin + size)
