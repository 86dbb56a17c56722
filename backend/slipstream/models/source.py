"""What a source of tensors does (files, random values, sizes), and its part below a prefix."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.runtime.registry import Target, target_of
from slipstream.layers.source import Stored
from slipstream.models.packed_store import PackedStore
from slipstream.quant.matrix import QuantMatrix

T = TypeVar("T")


class Source(Protocol):
    """A source of tensors."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of files that are used where they lie."""

    def has(self, name: str) -> bool:
        """Return whether the source has the tensor."""

    def fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Write each tensor into its `out`; `CheckpointError` if absent or of another shape."""

    def pass_over(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Count tensors as read, whose use is kept elsewhere; raises `CheckpointError`."""

    def mapped(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor | None:
        """Return tensors under one another, as they lie in a file; None: they must be copied."""

    def stored_rows(self, name: str, rows: int, inputs: int, dtype: torch.dtype) -> Stored | None:
        """Return a quantised matrix of which rows are looked up; None: it must be dequantised."""

    def number(self, name: str) -> float:
        """Return a scale; raises `CheckpointError` if it is absent or out of range."""

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Read the matrix `name` if it is quantised; raises `CheckpointError` if it is wrong."""

    def is_quantised(self, name: str) -> bool:
        """Return whether the matrix `name` is quantised."""

    def is_in_blocks(self, name: str) -> bool:
        """Return whether the matrix `name` is in blocks of 4 to 8 bits."""

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the source has exactly this tensor; None: in none."""

    def note(self, text: str) -> None:
        """Say this when all is read, once."""

    def finish(self) -> None:
        """Raise `CheckpointError` if a tensor was never read."""


class Weights:
    """The tensors of a source below a prefix, from which a layer is built."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "auto",
        deterministic: bool = False,
        prefix: str = "",
        target: Target | None = None,
        store: PackedStore | None = None,
    ) -> None:
        self._source = source
        self._target = target or target_of(device)
        self._device = device
        self._dtype = dtype
        self._quantization = quantization
        self._deterministic = deterministic
        self._prefix = prefix
        self._store = store

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._device

    @property
    def target(self) -> Target:
        """The device that multiplies: that of the tensors unless they stand in for others."""
        return self._target

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return self._dtype

    @property
    def quantization(self) -> str:
        """The scheme of the blocks' matrices, one of `quant.names()`, unless they come in one."""
        return self._quantization

    @property
    def deterministic(self) -> bool:
        """Whether a row's result must not depend on the other rows of the batch."""
        return self._deterministic

    @property
    def mapped_bytes(self) -> int:
        """Bytes of files that are used where they lie: memory that looks as if it were free."""
        kept = 0 if self._store is None else self._store.mapped_bytes
        return self._source.mapped_bytes + kept

    def at(self, prefix: str) -> "Weights":
        """Return the weights below `prefix.`."""
        prefix = f"{self._prefix}{prefix}."
        settings = (self._device, self._dtype, self._quantization, self._deterministic)
        return Weights(self._source, *settings, prefix, self._target, self._store)

    def has(self, name: str) -> bool:
        """Return whether the source has this tensor."""
        return self._source.has(self._prefix + name)

    def number(self, name: str) -> float:
        """Read the scale in a tensor of one element, above zero."""
        return self._source.number(self._prefix + name)

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Read the matrix `name`, `[rows, inputs]`, if the source has it quantised."""
        return self._source.quantized(self._prefix + name, rows, inputs)

    def stored_rows(self, name: str, rows: int, inputs: int) -> Stored | None:
        """Return a matrix of which rows are looked up as they are stored, where a CPU can."""
        if self._target.device != "cpu":
            return None
        return self._source.stored_rows(self._prefix + name, rows, inputs, self._dtype)

    def is_quantised(self, name: str) -> bool:
        """Return whether the source has the matrix `name` quantised."""
        return self._source.is_quantised(self._prefix + name)

    def is_in_blocks(self, name: str) -> bool:
        """Return whether the source has the matrix `name` in blocks of 4 to 8 bits."""
        return self._source.is_in_blocks(self._prefix + name)

    def note(self, text: str) -> None:
        """Have the source say this when all is read, once."""
        self._source.note(text)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Read a tensor, which must have this shape."""
        return self.stacked([name], shape[:1], *shape[1:])

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the source has exactly this tensor; None: in none."""
        return self._source.dtype_of(self._prefix + name)

    def stacked(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *rest: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read tensors of shapes `[rows[i], *rest]`, concatenated to `[sum(rows), *rest]`.

        They are copied, to `dtype`, if that is given; else they may lie in their file.
        """
        full = [self._prefix + name for name in names]
        shapes = [(count, *rest) for count in rows]
        if rows and dtype is None:
            found = self._source.mapped(full, shapes, self._dtype)
            if found is not None:
                return found
        shape = (sum(rows), *rest) if rows else ()  # one number
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self._source.fill(full, torch.split(out, list(rows)) if rows else [out])
        return out

    def packed(
        self, names: Sequence[str], rows: Sequence[int], inputs: int, make: Callable[[], T]
    ) -> T | Matrix:
        """Return what `make` makes of matrices `[rows[i], inputs]`, or an earlier start made."""
        if self._store is None:
            return make()
        full = [self._prefix + name for name in names]
        name = " ".join(full)
        found = self._store.take(name, sum(rows), inputs)
        if found is not None:
            self._source.pass_over(full, [(count, inputs) for count in rows])
            return found
        made = make()
        self._store.keep(name, made)
        return made

    def finish(self) -> None:
        """Raise `CheckpointError` if the source has a tensor that was never read.

        What was packed of sound weights is kept then, if there is a place for it.
        """
        self._source.finish()
        if self._store is not None:
            self._store.finish()
