"""Modules of which a window is read: a format reads them as it reads a smaller matrix."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.models.formats.module import Module, RawSource
from slipstream.models.parts import Window


class Seen(Module):
    """A module without data: which of the shapes that a format knows each tensor has."""

    def __init__(self, name: str, source: RawSource) -> None:
        super().__init__(name, source)
        self.note = lambda text: None
        self.shapes: dict[str, int] = {}

    def take(self, part: str, dtypes: Sequence[str], *shapes: Sequence[int]) -> Tensor:
        """Return a tensor's shape, of those that are allowed; raises `CheckpointError`."""
        self._check(part, dtypes, shapes)
        found = self.shape(part)
        self.shapes[part] = next(i for i, each in enumerate(shapes) if tuple(each) == found)
        return self._source.like(f"{self.name}.{part}")

    def drop(self, part: str, why: str) -> None:
        """Leave that to the reading of the window."""


class Windowed(Module):
    """A window of a module, whose tensors have the shapes of a matrix of its size.

    `shapes` are those of `Seen`: the window's shape of a tensor is the same one of those allowed.
    """

    def __init__(
        self, name: str, source: RawSource, window: Window, shapes: dict[str, int]
    ) -> None:
        super().__init__(name, source)
        self._window, self._shapes = window, shapes
        self.first_input = window.begin if window.dim == 1 else 0
        self.has_some_inputs = window.dim == 1

    def whole(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the matrix of which the window has `[outputs, inputs]`."""
        total = self._window.total
        return (total, inputs) if self._window.dim == 0 else (outputs, total)

    def take(self, part: str, dtypes: Sequence[str], *shapes: Sequence[int]) -> Tensor:
        """Read what the window has of a tensor."""
        own = tuple(shapes[self._shapes[part]])
        region = self._window.region(own, self.shape(part))
        return self._finite(part, self._source.raw(f"{self.name}.{part}", region))
