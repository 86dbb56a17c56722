"""What a loop serves: an engine, or several behind a router."""

from collections.abc import Callable, Iterable
from typing import Protocol

from slipstream_contract.errors import ContractError
from slipstream_runtime.admission import Load

from slipstream.core.prefix import PrefixIndex
from slipstream.wire import (
    AdapterInfo,
    CancelCause,
    Figures,
    Rejected,
    Status,
    Submit,
    Tokens,
)

Changed = Callable[[list[AdapterInfo], list[str]], None]  # new or changed ones; removed names


class Adapters(Protocol):
    """The adapters that requests may name; see `engine/adapters.py`."""

    when_changed: Changed

    @property
    def is_loading(self) -> bool:
        """Whether `poll` has something to finish."""

    def poll(self) -> None:
        """Finish what has been read meanwhile."""

    def take_watched(self) -> None:
        """Take what has changed by itself."""

    def start_load(
        self, name: str, path: str, reply: Callable[[ContractError | None], None]
    ) -> None:
        """Load an adapter; `reply` gets the error, if any. Raises ContractError at once, too."""

    def unload(self, name: str) -> None:
        """Discard a name. Raises ContractError."""

    def infos(self) -> list[AdapterInfo]:
        """Return all adapters."""


class Served(Protocol):
    """Requests in, tokens out; see `engine/engine.py`."""

    @property
    def fatal(self) -> Exception | None:
        """The error after which the process must end."""

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""

    @property
    def adapters(self) -> Adapters:
        """The adapters."""

    @property
    def prefixes(self) -> PrefixIndex:
        """The digests of cached blocks."""

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not ended."""

    def has_request(self, bridge: bytes, request: int) -> bool:
        """Return whether that request of a bridge has not ended."""

    def submit(self, bridge: bytes, message: Submit) -> None:
        """Queue a request. Raises ContractError if it is refused."""

    def cancel(
        self, bridge: bytes, request: int, cause: CancelCause = ..., noticed_ns: int = 0
    ) -> bool:
        """End a request; return False if there is none such."""

    def cancel_bridge(self, bridge: bytes) -> int:
        """Cancel all requests of a bridge; return how many there were."""

    def slack_ns(self) -> float:
        """Return how long the next `step` can wait for requests, in ns."""

    def step(self) -> dict[bytes, list[Tokens]]:
        """Return new tokens for each bridge."""

    def take_rejected(self) -> list[tuple[bytes, Rejected]]:
        """Return requests, by bridge, that cannot be served after all."""

    def load(self) -> Load:
        """Return how much is waiting, and how much may wait."""

    def status(self, number: int = 0, bridges: Iterable[str] = ()) -> Status:
        """Return the answer to a `Ping`."""

    def figures(self, num_dropped: int = 0) -> Figures:
        """Return all metrics."""

    def requests_of(self, bridge: bytes) -> list[int]:
        """Return the numbers of a bridge's requests that have not ended."""
