"""The connections that keep an engine running: it ends soon after the last of them says `Bye`.

A model says `Bye` when Triton unloads it. A model's process that dies says nothing: `slipstream
serve` repairs it, and until then the engine stays. A connection that keeps nothing, as a gateway's,
is served for as long as there are others.
"""

import time
from collections.abc import Callable

from slipstream.wire import Hello

UNUSED_S = 3.0  # a repair unloads a model and loads it again within this time


class Keepers:
    """The connections that keep the engine, by their identity."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bridges: set[bytes] = set()
        self._is_unloading = False  # a `Bye` came, and no `Hello` since
        self._changed_s = clock()

    def add(self, bridge: bytes, hello: Hello) -> None:
        """Note a connection."""
        if hello.keeps_engine:
            self._bridges.add(bridge)
            self._is_unloading = False

    def remove(self, bridge: bytes, says_bye: bool = False) -> None:
        """Note the end of a connection; that of an unknown one changes nothing."""
        if bridge in self._bridges:
            self._bridges.remove(bridge)
            self._is_unloading |= says_bye
            self._changed_s = self._clock()

    @property
    def are_gone(self) -> bool:
        """Whether all models were unloaded: a request of another connection is refused."""
        return self._is_unloading and not self._bridges

    @property
    def are_gone_for_good(self) -> bool:
        """Whether that was so long ago that none is about to come back."""
        return self.are_gone and self._clock() - self._changed_s > UNUSED_S
