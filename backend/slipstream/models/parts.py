"""The part of a quantised matrix that a rank of several has, and the window of it that is read.

A window is what a format can read of a matrix by itself: rows or inputs in whole words, groups and
blocks. The part is cut out of it, and zeros are put behind.
"""

from typing import NamedTuple

import torch

from slipstream.models.cuts import Cut, MatrixCut
from slipstream.models.moves import with_rows
from slipstream.quant.matrix import QuantMatrix, rows
from slipstream.quant.parts import inputs_of, of_zeros, padded


class Window(NamedTuple):
    """Rows (`dim` 0) or inputs (1) `begin .. end` of the `total` of a matrix."""

    dim: int
    begin: int
    end: int
    total: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nothing out."""
        return self.size == self.total

    def sizes(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return rows and inputs of the window in a matrix of these."""
        return (self.size, inputs) if self.dim == 0 else (outputs, self.size)

    def region(self, part: tuple[int, ...], whole: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where in a tensor of shape `whole` that of the window, of shape `part`, lies.

        Windows begin at words, groups and blocks, so places in tensors are in proportion.
        """
        return tuple(
            slice(None) if few == many else slice(at, at + few)
            for few, many in zip(part, whole, strict=True)
            for at in [self._place(few, many)]
        )

    def _place(self, few: int, many: int) -> int:
        if self.begin == 0:
            return 0
        return many - few if self.end == self.total else self.begin * few // self.size


def window_of(cut: MatrixCut, units: tuple[int, int] | None) -> Window | None:
    """Return the least window around a part; None: the whole matrix is read.

    `units` are the rows and inputs at whose multiples a format can begin; None: only at the first.
    """
    dim = 0 if cut.inputs is None else 1
    own = cut.rows or cut.inputs
    assert own is not None, "something is cut"
    if units is None or cut.copies > 1:
        return None
    begin, count = own.stored
    unit = units[dim]
    if count == 0:
        begin, count = 0, 1
    end = min(-(-(begin + count) // unit) * unit, own.total)
    found = Window(dim, begin // unit * unit, end, own.total)
    return None if found.is_whole else found


def part_of(matrix: QuantMatrix, cut: MatrixCut, window: Window | None) -> QuantMatrix:
    """Return the part of a matrix, of which `matrix` is a window, or all of it."""
    first = 0 if window is None else window.begin
    if cut.inputs is not None:
        begin, count = cut.inputs.stored
        if count == 0:
            return padded(
                of_zeros(inputs_of(matrix, 0, min(matrix.group, matrix.inputs))), cut.inputs.count
            )
        return padded(inputs_of(matrix, begin - first, count), cut.inputs.count)
    assert cut.rows is not None, "something is cut"
    begin, count = cut.rows.stored
    if count == cut.rows.count and cut.copies == 1:
        return rows(matrix, slice(begin - first, begin - first + count))
    return with_rows(matrix, _sources(cut.rows, cut.copies, first, matrix))


def _sources(cut: Cut, copies: int, first: int, matrix: QuantMatrix) -> torch.Tensor:
    """Return which row of `matrix` each of the part's is; -1: zeros."""
    begin, count = cut.stored
    own = torch.full((cut.count,), -1)
    own[:count] = torch.arange(begin - first, begin - first + count)
    each = own + torch.arange(copies)[:, None] * cut.total
    each = torch.where(own < 0, -1, each).flatten()
    return each if matrix.codes.is_meta else each.to(matrix.codes.device)
