"""The interface of a scheme."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.runtime.registry import Target
from slipstream.quant.matrix import QuantMatrix

T = TypeVar("T")


class MatrixSource(Protocol):
    """Tensors of a checkpoint below a prefix; each comes in the engine's dtype, on its device."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""

    @property
    def target(self) -> Target:
        """The device that multiplies; tensors may be on `meta` in its place."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""

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

    def packed(
        self, names: Sequence[str], rows: Sequence[int], inputs: int, make: Callable[[], T]
    ) -> T | Matrix:
        """What `make` makes of matrices `[rows[i], inputs]`, or what an earlier start made."""

    def note(self, text: str) -> None:
        """Have the start say this of a matrix; what is said of several is said once."""


class Scheme(ABC):
    """A way to keep the weights of linear layers, and to multiply with them."""

    name: ClassVar[str]

    def detects(self, w: MatrixSource, names: Sequence[str]) -> bool:
        """Whether the checkpoint stores the matrices `names` in this scheme already."""
        return False

    @abstractmethod
    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Any:
        """Read matrices `[outputs[i], inputs]` and pack them into one.

        A `Matrix` (`kernels/gemm/op.py`) lets GEMMs fuse the stages around the product; anything
        else is multiplied by `matmul` alone.
        """

    @abstractmethod
    def matmul(self, x: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
        """`x W^T + b`, `[n, m]` in the dtype of `x`; `weights` are what `read` returned."""

    def check(  # noqa: B027
        self, sizes: Mapping[str, int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raise `ConfigError` where a device, a dtype or a size cannot be had.

        `sizes` are inputs of matrices by their name in config.json.
        """
