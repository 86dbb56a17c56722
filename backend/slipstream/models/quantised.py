"""Read quantised matrices by the decoder's names: whole, or the part of a rank."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from slipstream.models.axes import TensorNames
from slipstream.models.formats.module import RawSource
from slipstream.models.formats.registry import Formats
from slipstream.models.gguf.kept import KEPT, kept
from slipstream.models.gguf.part import region_of, units, within
from slipstream.models.moves import moved
from slipstream.models.parts import part_of, window_of
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
        entry = self._source.entry(f"{stored}.weight")
        is_kept = entry is not None and entry.dtype in KEPT
        return is_kept or self._formats.is_quantised(stored)

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
        entry = self._source.entry(f"{stored}.weight")
        if entry is not None and entry.dtype in KEPT and moves is None:
            window = None if cut is None else window_of(cut, units(entry))
            region = () if window is None else region_of(entry, window)
            blocks = self._source.blocks(name, rows, inputs, region)
            matrix = kept(entry if window is None else within(entry, window), blocks)
            self._source.check_scales(f"{stored}.weight", matrix.scales)
            return matrix if cut is None else part_of(matrix, cut, window)
        if moves is None:
            if cut is None:
                return self._formats.load(stored, *whole)
            return self._formats.load_part(stored, *whole, cut)
        found = self._stored(name, stored, (rows, inputs), moves.shape(*whole))
        if found is None:
            return None
        found = moved(found, moves, f"{self._directory}: {stored}")
        return found if cut is None else part_of(found, cut, None)

    def _stored(
        self, name: str, stored: str, own: tuple[int, int], shape: tuple[int, int]
    ) -> QuantMatrix | None:
        """Read the whole of a matrix that is changed, of `shape` in the file; `own` is a rank's."""
        entry = self._source.entry(f"{stored}.weight")
        if entry is None or entry.dtype not in KEPT:
            return self._formats.load(stored, *shape)
        matrix = kept(entry, self._source.blocks(name, *own, ()))
        self._source.check_scales(f"{stored}.weight", matrix.scales)
        return matrix
