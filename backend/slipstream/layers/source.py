"""The protocol by which layers read their weights."""

from typing import Protocol

import torch
from torch import Tensor

from slipstream.quant.scheme import MatrixSource


class Stored(Protocol):
    """A matrix as a file has it, of which rows are looked up."""

    shape: tuple[int, int]
    dtype: torch.dtype  # of rows

    def __call__(self, ids: Tensor) -> Tensor:
        """Return some rows: `[n] i64 -> [n, inputs]`."""

    def whole(self) -> Tensor:
        """Return all rows."""


class WeightSource(MatrixSource, Protocol):
    """A checkpoint's tensors below a prefix, of which schemes read matrices and layers all else."""

    @property
    def quantization(self) -> str:
        """The scheme of the blocks' matrices, one of `quant.names()`, unless they come in one."""

    @property
    def deterministic(self) -> bool:
        """Whether a row's product may not depend on the rows beside it."""

    def at(self, prefix: str) -> "WeightSource":
        """The view below `prefix.`."""

    def number(self, name: str) -> float:
        """Return the one number of a tensor: a scale, above zero."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, which must have this shape."""

    def stored_rows(self, name: str, rows: int, inputs: int) -> Stored | None:
        """A matrix of which rows are looked up as the checkpoint has them, where a CPU can."""

    def is_quantised(self, name: str) -> bool:
        """Whether the checkpoint has the matrix `name` quantised."""

    def is_in_blocks(self, name: str) -> bool:
        """Whether the checkpoint has the matrix `name` in blocks of 4 to 8 bits, as GGUF files."""
