"""Modules of which a window is read: a format reads them as it reads a smaller matrix."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from slipstream.models.formats.module import Module, RawSource, split_halves
from slipstream.models.parts import Window


class Seen(Module):
    """A module without data: which of the shapes that a format knows each tensor has."""

    def __init__(self, name: str, source: RawSource, shapes: dict[str, int] | None = None) -> None:
        super().__init__(name, source)
        self.note = lambda text: None
        self.shapes: dict[str, int] = {} if shapes is None else shapes

    def take(
        self, part: str, dtypes: Sequence[str], *shapes: Sequence[int], rows: int = 0
    ) -> Tensor:
        """Return a tensor's shape, of those that are allowed; raises `CheckpointError`."""
        self._check(part, dtypes, shapes)
        found, name = self.shape(part), f"{self.name}.{part}"
        self.shapes[name] = next(i for i, each in enumerate(shapes) if tuple(each) == found)
        return self._source.like(name)

    def drop(self, part: str, why: str) -> None:
        """Leave that to the reading of the window."""

    def _at(self, name: str) -> Module:
        return Seen(name, self._source, self.shapes)


class Windowed(Module):
    """A window of a module, whose tensors have the shapes of a matrix of its size.

    `shapes` are those of `Seen`: the window's shape of a tensor is the same one of those allowed.
    """

    def __init__(
        self, name: str, source: RawSource, window: Window, shapes: dict[str, int]
    ) -> None:
        super().__init__(name, source)
        self._window, self._shapes = window, shapes
        self.first_input = window.first if window.dim == 1 else 0
        self.has_some_inputs = window.dim == 1

    def whole(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the matrix of which the window has `[outputs, inputs]`."""
        total = self._window.total
        if self._window.dim == 1:
            return outputs, total
        return self._window.copies * total, inputs

    def take(
        self, part: str, dtypes: Sequence[str], *shapes: Sequence[int], rows: int = 0
    ) -> Tensor:
        """Read what the window has of a tensor; if that is inputs, of each of `rows` in turn."""
        name = f"{self.name}.{part}"
        own, whole = tuple(shapes[self._shapes[name]]), self.shape(part)
        view: tuple[int, ...] = ()
        if rows and self.has_some_inputs and own != whole:
            view = whole = (rows, prod(whole) // rows)
            own = (rows, prod(own) // rows)
        found = self._window.read(own, whole, lambda region: self._source.raw(name, region, view))
        return self._finite(part, found)

    def take_halves(self, part: str, outputs: int, inputs: int) -> Tensor:
        """Read what the window has of numbers of 4 bits; see `Module`.

        Where rows have an odd number of them, every second row begins within a byte.
        """
        total = self._window.total
        if not self.has_some_inputs or total % 2 == 0:
            return super().take_halves(part, outputs, inputs)
        rows = []
        for start in (self.first_input, total + self.first_input):  # of the two of a pair
            region = slice(None), slice(start // 2, -(-(start + inputs) // 2))
            found = self._source.raw(f"{self.name}.{part}", region, (outputs // 2, total))
            rows.append(split_halves(found)[:, start % 2 :][:, :inputs])
        return torch.stack(rows, 1).flatten(0, 1)

    def _at(self, name: str) -> Module:
        return Windowed(name, self._source, self._window, self._shapes)
