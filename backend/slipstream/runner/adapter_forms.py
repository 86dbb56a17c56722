"""An adapter in host memory, as it is read, and on the device, as steps use it."""

from dataclasses import dataclass

from slipstream.layers.adapted import Terms
from slipstream.models.adapters.read import AdapterWeights
from slipstream.runner.adapter_tables import Laid


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

    On a CPU it is laid out for the kernels then, so a load copies nothing, unless tiles that are
    filled up would take more than twice its bytes.
    """

    num_pages: int = 0  # of the pool, on the stage where it takes most
    laid: Laid | None = None  # None: each load lays it out
