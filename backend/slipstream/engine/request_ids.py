"""Track the ids that clients gave to running requests.

Several processes may serve one model, each with its own connection, and none knows the requests of
the others. A bridge handles duplicates among its own requests itself: several may share an id.
"""

from typing import Generic, Protocol, TypeVar

from slipstream_contract.errors import Code, ContractError

from slipstream.wire import CancelCause, Submit


class Running(Protocol):
    """A request that has not ended."""

    bridge: bytes
    message: Submit
    cause: CancelCause | None  # why it is ended before its end


R = TypeVar("R", bound=Running)


class RequestIds(Generic[R]):
    """Running requests by model and id, if they have an id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[R]] = {}

    def refuse_duplicate(self, bridge: bytes, model: str, request_id: str) -> None:
        """Raise `ContractError` if another bridge of that model runs a request with that id."""
        for request in self._running.get((model, request_id), ()):
            if request.bridge != bridge and request.cause is None:
                raise ContractError(
                    f"request id {request_id!r:.64} is already running", Code.ALREADY_EXISTS
                )

    def add(self, request: R) -> None:
        """Add a request that is queued."""
        message = request.message
        if message.request_id:
            key = message.model, message.request_id
            self._running.setdefault(key, []).append(request)

    def remove(self, request: R) -> None:
        """Remove a request that has ended."""
        message = request.message
        if message.request_id:
            key = message.model, message.request_id
            self._running[key].remove(request)
            if not self._running[key]:
                del self._running[key]

    def __len__(self) -> int:
        """Return the number of ids in use."""
        return len(self._running)
