"""The tensors that a checkpoint has of one matrix, and what its formats share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.entries import TensorEntry

FLOATS = ("F32", "F16", "BF16")
WORD = 32  # bits


class RawSource(Protocol):
    """Tensors as a file stores them, by its own names."""

    @property
    def directory(self) -> Path:
        """The checkpoint's, which names what no file has."""

    def entry(self, name: str) -> TensorEntry | None:
        """The place of a tensor; None: there is none."""

    def like(self, name: str) -> Tensor:
        """Return the shape and dtype of a tensor as it is stored, without data."""

    def raw(self, name: str, region: tuple[slice, ...] = (), view: tuple[int, ...] = ()) -> Tensor:
        """Read a tensor, or a region of it, as it is stored, to the source's device.

        `view` is the shape in which the region lies; (): that of the file.
        """

    def raw_bytes(self, name: str) -> bytes:
        """Read a small tensor's bytes, whatever the device."""

    def peek(self, name: str) -> bytes:
        """Read a small tensor's bytes, which something else has still to read."""

    def note(self, text: str) -> None:
        """Have the start say this."""


class Module:
    """A matrix `[outputs, inputs]` of a checkpoint by the parts of its name.

    Args:
        name: in the checkpoint, without `.weight`.
        source: the files.
    """

    first_input = 0  # of those that are read
    has_some_inputs = False  # as a window has that is not of rows

    def __init__(self, name: str, source: RawSource) -> None:
        self.name = name
        self.note = source.note
        self._source = source

    def whole(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the matrix of which `[outputs, inputs]` are read."""
        return outputs, inputs

    def has(self, part: str) -> bool:
        """Whether there is such a tensor."""
        return self._source.entry(f"{self.name}.{part}") is not None

    def around(self) -> tuple["Module", str]:
        """Return the module around it, and its own name there."""
        name, _, last = self.name.rpartition(".")
        return self._at(name), last

    def _at(self, name: str) -> "Module":
        return Module(name, self._source)

    def dtype(self, part: str) -> str:
        """Name its dtype; empty: there is no such tensor."""
        entry = self._source.entry(f"{self.name}.{part}")
        return "" if entry is None else entry.dtype

    def shape(self, part: str) -> tuple[int, ...]:
        """Return its shape, () if there is none."""
        entry = self._source.entry(f"{self.name}.{part}")
        return () if entry is None else entry.shape

    def take(
        self, part: str, dtypes: Sequence[str], *shapes: Sequence[int], rows: int = 0
    ) -> Tensor:
        """Read a tensor of one of these dtypes and shapes; raises `CheckpointError` for others.

        `rows` is of a flat tensor that has as many numbers for each row, one row after another.
        """
        self._check(part, dtypes, shapes)
        return self._finite(part, self._source.raw(f"{self.name}.{part}"))

    def take_halves(self, part: str, outputs: int, inputs: int) -> Tensor:
        """Read numbers of 4 bits, `[outputs, inputs]` u8; raises `CheckpointError`.

        They lie behind one another, over the ends of rows, the first in a byte's upper half.
        """
        count = outputs * inputs
        shapes = (-(-count // 2), 1), (-(-count // 2),)
        found = self.take(part, ("U8",), *shapes, rows=outputs).flatten()
        return split_halves(found)[:count].view(outputs, inputs)

    def _check(self, part: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        entry = self._source.entry(f"{self.name}.{part}")
        if entry is None:
            raise self.refusal(part, "is missing")
        if entry.dtype not in dtypes:
            raise self.refusal(part, f"is {entry.dtype}, not {' or '.join(dtypes)}")
        if entry.shape not in {tuple(shape) for shape in shapes}:
            known = " or ".join(str(list(shape)) for shape in shapes)
            raise self.refusal(part, f"is {list(entry.shape)}, not {known}")

    def _finite(self, part: str, tensor: Tensor) -> Tensor:
        if self.dtype(part) in FLOATS and not tensor.is_meta and not bool(tensor.isfinite().all()):
            raise self.refusal(part, "holds NaN or infinity")
        return tensor

    def drop(self, part: str, why: str) -> None:
        """Leave out a tensor that serving does not need; the start says so once."""
        if self.has(part):
            self._source.raw_bytes(f"{self.name}.{part}")
            self.note(f"{part}: {why}")

    def is_zero(self, part: str) -> bool:
        """Return whether all bytes of a small tensor are zero; that does not read it."""
        return not any(self._source.peek(f"{self.name}.{part}"))

    def drop_activations(self) -> None:
        """Leave out static scales of activations: rows have their own, made at each step."""
        for part in ("input_scale", "input_global_scale"):
            if self.has(part):
                scale = self.take(part, FLOATS, (), (1,), (1, 1))
                if not scale.is_meta and not bool((scale > 0).all()):
                    raise self.refusal(part, "is no scale: not above 0")
        why = "read and not used: activations are not rounded, or by each token's own scale"
        for part in ("input_scale", "input_global_scale", "input_zero_point"):
            self.drop(part, why)

    def text(self, part: str) -> bytes:
        """Read the bytes of a small tensor."""
        return self._source.raw_bytes(f"{self.name}.{part}")

    def numbers(self, part: str) -> Tensor:
        """Read all of a small tensor of I32 or I64 on the host, where there is no data else."""
        dtype = torch.int64 if self.dtype(part) == "I64" else torch.int32
        return torch.frombuffer(bytearray(self.text(part)), dtype=dtype)

    def refusal(self, part: str, why: str) -> CheckpointError:
        """Return an error that names file, or directory, tensor and reason."""
        parts = (part, "weight", "qweight", "weight_packed")
        found = (self._source.entry(f"{self.name}.{each}") for each in parts)
        entry = next((each for each in found if each is not None), None)
        where = self._source.directory if entry is None else entry.file
        return CheckpointError(f"{where}: tensor {self.name}.{part} {why}")


def unpack(words: Tensor, bits: int, count: int, is_dense: bool = True) -> Tensor:
    """Take the first `count` values from words of 32 bits along the last dimension, as u8.

    The first is in the lowest bits. Dense values may straddle two words; else a word has as many as
    fit.
    """
    mask = (1 << bits) - 1
    if WORD % bits == 0 or not is_dense:
        shifts = torch.arange(WORD // bits, device=words.device, dtype=torch.int32) * bits
        values = (words[..., None] >> shifts) & mask
        return values.flatten(-2)[..., :count].to(torch.uint8)
    at = torch.arange(count, device=words.device) * bits
    word, shift = at // WORD, at % WORD
    unsigned = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    both = unsigned[..., word] | (unsigned[..., word + 1] << WORD)
    return ((both >> shift) & mask).to(torch.uint8)


def split_halves(x: Tensor) -> Tensor:
    """Return both halves of each byte along the last dimension, the upper one first."""
    return torch.stack([x >> 4, x & 15], -1).flatten(-2)


def num_words(count: int, bits: int, is_dense: bool = True) -> int:
    """Return how many words `count` values take."""
    return -(-count * bits // WORD) if is_dense else -(-count // (WORD // bits))


def num_groups(inputs: int, group: int) -> int:
    """Return how many groups inputs have, the last perhaps shorter."""
    return -(-inputs // group)


def over_rows(scales: Tensor, outputs: int, block: int = 1) -> Tensor:
    """Spread scales of `[rows or blocks of rows, groups]`, or of a whole tensor, over all rows."""
    if scales.numel() == 1 and block == 1:
        return scales.reshape(1, 1).expand(outputs, 1).contiguous()
    if block == 1:
        return scales.reshape(outputs, -1).contiguous()
    return scales.repeat_interleave(block, 0)[:outputs].contiguous()


def without(zeros: Tensor, value: int) -> Tensor | None:
    """Return zeros, or None where all are the one that needs no saying."""
    return None if not zeros.is_meta and bool((zeros == value).all()) else zeros


def check_numbers(module: Module, part: str, codes: Tensor) -> None:
    """Raise `CheckpointError` if e4m3 holds NaN."""
    if not codes.is_meta and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise module.refusal(part, "holds NaN")
