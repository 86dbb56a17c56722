"""The protocol by which layers read their weights."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.runtime.registry import Target
from slipstream.quant.matrix import QuantMatrix


class Stored(Protocol):
    """A matrix as a file has it, of which rows are looked up."""

    shape: tuple[int, int]
    dtype: torch.dtype  # of rows

    def __call__(self, ids: Tensor) -> Tensor:
        """Return some rows: `[n] i64 -> [n, inputs]`."""

    def whole(self) -> Tensor:
        """Return all rows."""


class WeightSource(Protocol):
    """A checkpoint's tensors below a prefix; each comes in the engine's dtype, on its device."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""

    @property
    def target(self) -> Target:
        """The device that multiplies; tensors may be on `meta` in its place."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""

    @property
    def quantization(self) -> str:
        """The scheme of the blocks' matrices, one of `quant.names()`, unless they come in one."""

    @property
    def deterministic(self) -> bool:
        """Whether a row's product may not depend on the rows beside it."""

    def at(self, prefix: str) -> "WeightSource":
        """The view below `prefix.`."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""

    def number(self, name: str) -> float:
        """Return the one number of a tensor: a scale, above zero."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, which must have this shape."""

    def stacked(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *rest: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Tensors of shapes `[rows[i], *rest]` under one another, in one matrix; a copy if
        a dtype is given.
        """

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype in which the checkpoint has exactly this tensor; None: in none of torch's."""

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """The matrix `name`, `[rows, inputs]`, if the checkpoint has it quantised."""

    def stored_rows(self, name: str, rows: int, inputs: int) -> Stored | None:
        """A matrix of which rows are looked up as the checkpoint has them, where a CPU can."""

    def is_quantised(self, name: str) -> bool:
        """Whether the checkpoint has the matrix `name` quantised."""

    def note(self, text: str) -> None:
        """Have the start say this of a matrix; what is said of several is said once."""
