"""Sources of tensors without files: random values for benchmarks, and sizes alone."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.layers.source import Stored
from slipstream.models.cuts import Cuts
from slipstream.quant.matrix import QuantMatrix

_log = logging.getLogger(__name__)


class _Unquantised:
    """A source without quantised matrices."""

    mapped_bytes = 0

    def quantized(self, name: str, rows: int, inputs: int) -> QuantMatrix | None:
        """Return None."""
        return None

    def pass_over(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """No tensor has to be read."""

    def mapped(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor | None:
        """Return None: there is no file."""
        return None

    def stored_rows(self, name: str, rows: int, inputs: int, dtype: torch.dtype) -> Stored | None:
        """Return None."""
        return None

    def is_quantised(self, name: str) -> bool:
        """Return False."""
        return False

    def is_in_blocks(self, name: str) -> bool:
        """Return False."""
        return False

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return None: values come in any dtype."""
        return None

    def note(self, text: str) -> None:
        """Nothing is to be said."""


class RandomSource(_Unquantised):
    """Seeded normal values of any shape: mean 1 for norms, else 0, standard deviation 0.02."""

    def __init__(self, device: torch.device, seed: int = 0, cuts: Cuts | None = None) -> None:
        self._cuts = cuts
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        """Return False: random weights have no optional tensors."""
        return False

    def fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Sample values in place on the device."""
        for name, out in zip(names, outs, strict=True):
            is_norm = out.ndim == 1 and name.endswith(".weight")
            cut = None if self._cuts is None else self._cuts.of(name, out.shape)
            whole = out if cut is None else out.new_empty(cut.whole(out.shape))
            whole.normal_(float(is_norm), 0.02, generator=self._generator)
            if cut is not None:
                cut.fill(out, cut.part_of(whole))

    def number(self, name: str) -> float:
        """Raise `CheckpointError`: random weights have no scales."""
        raise CheckpointError(f"random weights have no {name}")

    def finish(self) -> None:
        """Nothing can be left over."""
        _log.info("sampled random weights")


class SizeSource(_Unquantised):
    """Counts the elements of matrices, without data or files."""

    def __init__(self) -> None:
        self.elements: dict[str, int] = {}

    def has(self, name: str) -> bool:
        """Return False: optional tensors are not counted."""
        return False

    def fill(self, names: Sequence[str], outs: Sequence[Tensor]) -> None:
        """Record the sizes of `outs`, which may be on torch's device `meta`."""
        for name, out in zip(names, outs, strict=True):
            if out.ndim > 1:
                self.elements[name] = out.numel()

    def number(self, name: str) -> float:
        """Raise `CheckpointError`: there are no scales."""
        raise CheckpointError(f"{name} has no number")

    def finish(self) -> None:
        """Nothing can be left over."""
