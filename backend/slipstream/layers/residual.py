"""The sum that the blocks of a model add to."""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.comm.ranks import Part, Ranks
from slipstream.kernels.gemm.op import Addend


class Residual:
    """`[n, hidden]`, changed in place; at most one addend waits for the next reader of the sum."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._addend: Addend | None = None

    def __len__(self) -> int:
        return self._values.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sum."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the sum."""
        return self._values.device

    @property
    def values(self) -> Tensor:
        """The sum, the addend in it."""
        values, addend = self.take()
        if addend is not None:
            addend.add_to(values)
        return values

    def take(self) -> tuple[Tensor, Addend | None]:
        """Return the sum and the addend that its reader has to add, in place, before all else."""
        addend, self._addend = self._addend, None
        return self._values, addend

    def keep(self, rows: Tensor) -> None:
        """Keep these rows alone, `[r] i64`; they become `0 .. r - 1`."""
        self._values = self.values[rows]

    def add_later(self, addend: Addend) -> None:
        """Leave an addend to the next reader of the sum."""
        assert self._addend is None, "a block looks at the sum before it adds to it"
        self._addend = addend

    def add_part(self, ranks: Ranks, part: Callable[[Tensor | None], Tensor]) -> None:
        """Leave a part of a sum over ranks to the next reader: one sum, whatever waits already.

        `part` is called with the part that waits, to which it adds its own; None: there is none.
        """
        before = None
        if isinstance(self._addend, Part):
            before, self._addend = self._addend.x, None
        self.add_later(Part(ranks, part(before)))
