"""An adapter in host memory, as it is read, and on the device, as steps use it."""

from dataclasses import dataclass

import torch

from slipstream.kernels.cpu.native import library
from slipstream.layers.adapted import Terms
from slipstream.models.adapters.read import AdapterWeights
from slipstream.runner.adapter_tables import HostPages, Laid


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether a CPU has kernels for terms of a dtype."""
    return dtype == torch.float32 and library() is not None


@dataclass(slots=True)
class Loaded:
    """An adapter on the device."""

    own: Terms  # in one piece each, if torch adds them
    laid: Laid | None  # in pages, as kernels find it
    is_host: bool  # whether copies may be kept: the device's memory is bounded

    @property
    def terms(self) -> Terms:
        """Return the terms for torch: copies of those in pages, beside an adapter that has none."""
        if self.own or self.laid is None:
            return self.own
        made = self.laid.terms()
        if self.is_host:
            self.own = made
        return made


@dataclass(frozen=True, slots=True)
class ReadAdapter(AdapterWeights):
    """An adapter that has been read, and what is made of it in the thread that read it.

    It is laid out for the kernels then, unless tiles and pages that are filled up would take more
    than twice its bytes: a load copies pages as they are, and on a CPU nothing.
    """

    num_pages: int = 0  # of the pool, on the stage where it takes most
    host: HostPages | None = None  # None: each load lays it out
    laid: Laid | None = None  # on a CPU
