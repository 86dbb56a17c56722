"""Which requests run under which names: the ids that clients gave them.

A model may be served by several processes, each with a connection of its own, and none knows what
the others run. A bridge sees to its own requests itself, of which several may have one id.
"""

from slipstream_contract.errors import Code, ContractError

from slipstream.core.sequence import Request


class Names:
    """Requests by model and id, of those that were given an id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Request]] = {}

    def check(self, bridge: bytes, model: str, request_id: str) -> None:
        """Raise ContractError if another bridge of that model runs a request of that id."""
        for request in self._running.get((model, request_id), ()):
            if request.bridge != bridge and request.cause is None:
                raise ContractError(
                    f"request id {request_id!r:.64} is already running", Code.ALREADY_EXISTS
                )

    def add(self, request: Request) -> None:
        """It runs from now on."""
        if request.request_id:
            self._running.setdefault((request.model, request.request_id), []).append(request)

    def remove(self, request: Request) -> None:
        """It has ended."""
        if request.request_id:
            key = request.model, request.request_id
            self._running[key].remove(request)
            if not self._running[key]:
                del self._running[key]

    def __len__(self) -> int:
        """Ids that are in use."""
        return len(self._running)
