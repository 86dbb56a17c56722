"""The sum that the blocks of a model add to."""

from torch import Tensor

from slipstream.kernels.gemm.op import Addend


class Residual:
    """`[n, hidden]`, changed in place; at most one addend waits for the next reader of the sum."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._addend: Addend | None = None

    def __len__(self) -> int:
        return self._values.shape[0]

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
