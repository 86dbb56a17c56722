"""A matrix product, and what the layers ask of whoever holds the weights."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class WeightSource(Protocol):
    """A checkpoint's tensors below a prefix; each comes in the engine's dtype, on its device."""

    @property
    def device(self) -> torch.device:
        """Where tensors go."""

    def at(self, prefix: str) -> "WeightSource":
        """The view below `prefix.`."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor, which must have this shape."""

    def packed(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> Tensor:
        """Tensors of shapes `[rows[i], *rest]` under one another, in one matrix."""


class Linear:
    """`y = x W^T + b`, `W [out, in]`; projections of one input are packed into one matrix."""

    def __init__(
        self,
        w: WeightSource,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        bias: bool = False,
    ) -> None:
        self.weight = w.packed([f"{name}.weight" for name in names], outputs, inputs)
        self.bias = w.packed([f"{name}.bias" for name in names], outputs) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, in] -> [n, out]`."""
        return functional.linear(x, self.weight, self.bias)
