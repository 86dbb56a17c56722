"""The part of a stored matrix that a rank of several has, and the window of it that is read.

A window is what a format can read of a matrix by itself: rows or inputs in whole words, groups and
blocks. The part is taken out of it, rows in the decoder's order, and zeros are put behind.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.axes import Change, Moves
from slipstream.models.cuts import Cut, MatrixCut
from slipstream.models.moves import places, with_columns, with_rows
from slipstream.quant.matrix import QuantMatrix, rows
from slipstream.quant.parts import as_bytes, inputs_of, of_zeros, padded

Region = tuple[slice, ...]


class Span(NamedTuple):
    """Rows or inputs `begin .. end`."""

    begin: int
    end: int


class Window(NamedTuple):
    """Spans of the `total` rows (`dim` 0) or inputs (1) of a matrix; of inputs, one.

    copies: matrices that lie under one another, of each of which these are read.
    """

    dim: int
    spans: tuple[Span, ...]
    total: int
    copies: int = 1

    @property
    def first(self) -> int:
        """The first that is read."""
        return self.spans[0].begin

    @property
    def size(self) -> int:
        """How many there are."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nothing out."""
        return self.size == self.total

    def sizes(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return rows and inputs of the window in a matrix of these."""
        return (self.copies * self.size, inputs) if self.dim == 0 else (outputs, self.size)

    def read(
        self, part: Sequence[int], whole: Sequence[int], read: Callable[[Region], Tensor]
    ) -> Tensor:
        """Return what the window has of a tensor of shape `whole`, which has the shape `part`.

        Windows begin at words, groups and blocks, so places in tensors are in proportion. `read`
        gives a region of the tensor.
        """
        shapes = zip(part, whole, strict=True)
        axis = next((i for i, (few, many) in enumerate(shapes) if few != many), None)
        if axis is None:
            return read(())
        slices = self._slices(part[axis], whole[axis])
        found = [read((*[slice(None)] * axis, each)) for each in slices]
        if len(found) == 1:
            return found[0]
        return torch.cat([as_bytes(each) for each in found], axis).view(found[0].dtype)

    def local(self, sources: Tensor) -> Tensor:
        """Return where rows of the matrix are among those of the window; -1 stays."""
        own = torch.cat([torch.arange(*span) for span in self.spans])
        return torch.where(sources < 0, -1, torch.searchsorted(own, sources.clamp_min(own[0])))

    def _slices(self, few: int, many: int) -> list[slice]:
        if len(self.spans) > 1:
            return [
                slice(self._place(span.begin, many), self._place(span.end, many))
                for span in self.spans
            ]
        begin, end = self.spans[0]
        at = 0 if begin == 0 else many - few if end == self.total else begin * few // self.size
        return [slice(at, at + few)]

    def _place(self, row: int, many: int) -> int:
        return many if row == self.total else row * many // self.total


def spans_of(sources: Tensor, unit: int, total: int) -> tuple[Span, ...]:
    """Return the fewest whole units of `total` rows that have all of `sources`, but for -1."""
    found = torch.unique(sources[sources >= 0] // unit)
    if len(found) == 0:  # some must be read to know what zeros look like
        found = torch.zeros(1, dtype=torch.long)
    borders = (found.diff() != 1).nonzero().flatten() + 1
    runs = torch.tensor_split(found, borders)
    return tuple(Span(int(run[0]) * unit, min(int(run[-1] + 1) * unit, total)) for run in runs)


def sources_of(cut: Cut, change: Change | None, stored: int, dim: int) -> Tensor:
    """Return which of `stored` rows (`dim` 0) or inputs (1) each of a rank's is; -1: zeros.

    Raises RuntimeError if the change does more than to move these.
    """
    whole = torch.arange(stored) if change is None else places(change, stored, dim)
    begin, count = cut.stored
    own = torch.full((cut.count,), -1)
    own[:count] = whole[begin : begin + count]
    return own


class Part:
    """What a rank has of a stored matrix.

    Args:
        cut: of the decoder's matrix.
        shape: of the stored one.
        moves: how the decoder's is made of the stored one; None: they are the same.
    Raises RuntimeError if the matrix is changed in another way than by its rows and inputs.
    """

    def __init__(self, cut: MatrixCut, shape: tuple[int, ...], moves: Moves | None = None) -> None:
        self._cut, self._moves = cut, moves
        self.dim = 0 if cut.inputs is None else 1
        own = cut.rows or cut.inputs
        assert own is not None, "something is cut"
        self._own = own
        self._total = shape[self.dim] // (cut.copies if self.dim == 0 else 1)
        changes = (None, None) if moves is None else (moves.rows, moves.columns)
        self._is_moved = changes[self.dim] is not None
        self._other = changes[1 - self.dim]
        self._sources = sources_of(own, changes[self.dim], self._total, self.dim)

    def window(self, units: tuple[int, int] | None) -> Window | None:
        """Return the least window around the part; None: the whole matrix is read.

        `units` are the rows and inputs at whose multiples a format can begin; None: only at the
        first.
        """
        if units is None:
            return None
        spans = spans_of(self._sources, units[self.dim], self._total)
        if self.dim == 1:
            spans = (Span(spans[0].begin, spans[-1].end),)
        found = Window(self.dim, spans, self._total, self._cut.copies)
        return None if found.is_whole else found

    def all(self) -> Window:
        """Return the window that leaves nothing out."""
        return Window(self.dim, (Span(0, self._total),), self._total, self._cut.copies)

    def fill(self, out: Tensor, values: Tensor, window: Window) -> None:
        """Write the part, whose `values` of a window are plain numbers, and zeros behind."""
        device, local = values.device, self._local(window)
        if self._other is not None:
            values = _gathered(
                values,
                1 - self.dim,
                places(self._other, values.shape[1 - self.dim], 1 - self.dim, device),
            )
        first, count = int(local[0]), len(local)
        if first >= 0 and torch.equal(local, torch.arange(first, first + count)):
            out.copy_(values.narrow(self.dim, first, count))
        else:
            out.copy_(_gathered(values, self.dim, local.to(device)))

    def of(self, matrix: QuantMatrix, window: Window | None) -> QuantMatrix:
        """Return the part of a matrix, of which `matrix` is a window, or all of it."""
        found = self._rows(matrix, window) if self.dim == 0 else self._inputs(matrix, window)
        if self._other is None:
            return found
        device = "cpu" if found.codes.is_meta else found.codes.device
        if self.dim == 0:
            return with_columns(found, places(self._other, found.inputs, 1, device))
        return with_rows(found, places(self._other, found.outputs, 0, device))

    def _rows(self, matrix: QuantMatrix, window: Window | None) -> QuantMatrix:
        local, copies = self._local(window), self._cut.copies
        first, count = int(local[0]), len(local)
        if copies == 1 and first >= 0 and torch.equal(local, torch.arange(first, first + count)):
            return rows(matrix, slice(first, first + count))
        total = self._total if window is None else window.size
        each = torch.where(local < 0, -1, local + torch.arange(copies)[:, None] * total).flatten()
        return with_rows(matrix, each if matrix.codes.is_meta else each.to(matrix.codes.device))

    def _local(self, window: Window | None) -> Tensor:
        return self._sources if window is None else window.local(self._sources)

    def _inputs(self, matrix: QuantMatrix, window: Window | None) -> QuantMatrix:
        stored = self._sources[self._sources >= 0]
        if len(stored) == 0:
            least = of_zeros(inputs_of(matrix, 0, min(matrix.group, matrix.inputs)))
            return padded(least, self._own.count)
        begin, end = int(stored.min()), int(stored.max()) + 1
        first = 0 if window is None else window.first
        found = inputs_of(matrix, begin - first, end - begin)
        if not self._is_moved:
            return padded(found, self._own.count)
        sources = torch.where(self._sources < 0, -1, self._sources - begin)
        return with_columns(found, sources.to("cpu" if found.codes.is_meta else found.codes.device))


def _gathered(values: Tensor, dim: int, sources: Tensor) -> Tensor:
    """Return rows or inputs `sources` of numbers; -1: zeros."""
    found = values.index_select(dim, sources.clamp_min(0))
    return found.index_fill_(dim, (sources < 0).nonzero().flatten(), 0)
