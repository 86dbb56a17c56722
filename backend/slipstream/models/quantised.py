"""Read quantised matrices by the decoder's names: whole, or the part of a rank."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from slipstream.models.axes import TensorNames
from slipstream.models.formats.module import RawSource
from slipstream.models.formats.registry import Formats
from slipstream.models.gguf.kept import KEPT, kept
from slipstream.models.gguf.part import read_window, units, within
from slipstream.models.moves import moved, numbers_moved
from slipstream.models.parts import Part, Region
from slipstream.quant.matrix import QuantMatrix


class Blocks(RawSource, Protocol):
    """Tensors of a GGUF file, too."""

    def blocks(self, name: str, rows: int, inputs: int, region: tuple[slice, ...]) -> Tensor:
        """Read blocks of the matrix `name`, the decoder's name, of which a rank has so much."""

    def check_scales(self, name: str, scales: Tensor) -> None:
        """Have scales of blocks checked: that they are numbers."""


class Matrices:
    """The quantised matrices of a checkpoint.

    Args:
        directory: of the checkpoint.
        tensors: its names of the decoder's tensors.
        source: its tensors.
        head: name of the head.
    """

    def __init__(self, directory: Path, tensors: TensorNames, source: Blocks, head: str) -> None:
        self._directory, self._tensors, self._source = directory, tensors, source
        self._formats = Formats(directory, source, head)

    def is_quantised(self, stored: str) -> bool:
        """Return whether the matrix `stored`, the checkpoint's name, is quantised."""
        return self.is_in_blocks(stored) or self._formats.is_quantised(stored)

    def is_in_blocks(self, stored: str) -> bool:
        """Return whether the matrix `stored` is in blocks of 4 to 8 bits of a GGUF file."""
        entry = self._source.entry(f"{stored}.weight")
        return entry is not None and entry.dtype in KEPT

    def read(self, name: str, stored: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Read a matrix that the checkpoint has quantised, with all that belongs to it.

        Args:
            name: the decoder's.
            stored: the checkpoint's.
            rows, inputs: of the part that this rank has.
        """
        cuts, moves = self._tensors.cuts, self._tensors.moves(name)
        cut = None if cuts is None else cuts.of_matrix(name, rows, inputs)
        whole = (rows, inputs) if cut is None else cut.whole(rows, inputs)
        shape, where = (
            whole if moves is None else moves.shape(*whole),
            f"{self._directory}: {stored}",
        )
        own, is_kept = (rows, inputs), self.is_in_blocks(stored)
        if cut is None:
            found = (
                self._blocks(name, stored, own) if is_kept else self._formats.load(stored, *shape)
            )
            return moved(found, moves, where) if found is not None and moves is not None else found
        if not self.is_quantised(stored):
            return self._formats.load(stored, *shape)  # nothing, or a refusal
        with numbers_moved(where):
            part = Part(cut, shape, moves)
        if is_kept:
            return self._blocks(name, stored, own, part)
        with numbers_moved(where):
            return self._formats.load_part(stored, *shape, part)

    def _blocks(
        self, name: str, stored: str, own: tuple[int, int], part: Part | None = None
    ) -> QuantMatrix:
        """Read a matrix of a GGUF file, or a part; `own` is the shape that this rank has."""
        entry = self._source.entry(f"{stored}.weight")
        assert entry is not None, "it is quantised"
        window = None if part is None else part.window(units(entry))

        def read(region: Region) -> Tensor:
            return self._source.blocks(name, *own, region)

        if window is None:
            matrix = kept(entry, read(()))
        else:
            matrix = kept(within(entry, window), read_window(entry, window, read))
        has_units = matrix.units is not None  # then scales are whole numbers
        names = ("units", "low_units") if has_units else ("scales", "minimums")
        for scales in (getattr(matrix, name) for name in names):
            if scales is not None:
                self._source.check_scales(f"{stored}.weight", scales)
        return matrix if part is None else part.of(matrix, window)
