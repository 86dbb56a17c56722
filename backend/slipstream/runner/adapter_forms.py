"""An adapter in host memory, as it is read, and on the device, as steps use it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipstream.kernels.cpu.native import library
from slipstream.layers.adapted import Terms
from slipstream.models.adapters.read import AdapterWeights
from slipstream.runner.adapter_tables import HostPages, Laid


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether a CPU has kernels for terms of a dtype."""
    return dtype == torch.float32 and library() is not None


class Loaded(NamedTuple):
    """An adapter on the device: in every step kernels add its terms, or in every step torch does,
    whatever is beside it.
    """

    terms: Terms  # those that torch adds; none if kernels do
    laid: Laid | None  # in pages, as kernels find it; None: they do not take it


@dataclass(frozen=True, slots=True)
class ReadAdapter(AdapterWeights):
    """An adapter that has been read, and what is made of it in the thread that read it.

    It is laid out for the kernels then, unless tiles and pages that are filled up would take more
    than twice its bytes: a load copies pages as they are, and on a CPU nothing.
    """

    num_pages: int = 0  # of the pool, on the stage where it takes most
    host: HostPages | None = None  # None: each load lays it out
    laid: Laid | None = None  # on a CPU
