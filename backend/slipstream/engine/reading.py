"""An engine whose requests may bring weights: a thread reads them, while others are served.

To check and round the weights of a task (`lora_weights`) or a large `prompt_embedding_table` takes
as long as many steps. So such a request waits outside, and is submitted when they are read; what it
gets wrong is reported then. Requests that name a task whose weights are being read wait for them.
"""

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from slipstream_contract.errors import Code, ContractError

from slipstream.engine.engine import Engine
from slipstream.wire import CancelCause, Rejected, Submit, Tokens

MAX_BYTES = 1 << 30  # of weights that wait, or are being read
_AT_ONCE = 1 << 16  # bytes of a table that are read within the engine's thread
_WAIT_S = 0.002  # with nothing to compute


@dataclass(slots=True)
class _Arrival:
    """A request that waits for weights."""

    bridge: bytes
    message: Submit
    num_bytes: int = 0
    weights: Future[Any] | None = None  # None: it names a task before it
    cancel: tuple[CancelCause, int] | None = None


class ReadingEngine(Engine):
    """An engine that reads the weights of requests in a thread, in the order of their arrival."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Start without requests; see `Engine`."""
        super().__init__(*given, **named)
        self._arrivals: deque[_Arrival] = deque()  # requests that wait for weights, in order
        self._rejected: list[tuple[bytes, Rejected]] = []
        self._threads: ThreadPoolExecutor | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute, read or send anything."""
        return bool(self._arrivals or self._rejected) or super().has_work

    def has_request(self, bridge: bytes, request: int) -> bool:
        """Return whether that request of a bridge has not ended."""
        return self._find(bridge, request) is not None or super().has_request(bridge, request)

    def requests_of(self, bridge: bytes) -> list[int]:
        """Return the numbers of a bridge's requests that have not ended."""
        waiting = [each.message.request for each in self._arrivals if each.bridge == bridge]
        return [*waiting, *super().requests_of(bridge)]

    def submit(self, bridge: bytes, message: Submit) -> None:
        """Queue a request, or have its weights read first. Raises `ContractError`."""
        arrival = self._arrival(bridge, message)
        if arrival is None:
            super().submit(bridge, message)
            return
        self.load().raise_if_full(len(message.token_ids))
        waiting = sum(each.num_bytes for each in self._arrivals)
        if waiting and waiting + arrival.num_bytes > MAX_BYTES:
            raise ContractError(
                f"the request has {arrival.num_bytes} bytes of weights, and {waiting} bytes of "
                f"others are being read: {MAX_BYTES} at most wait",
                Code.UNAVAILABLE,
            )
        self._arrivals.append(arrival)

    def _arrival(self, bridge: bytes, message: Submit) -> _Arrival | None:
        """Start to read what a request brings; None: it need not wait."""
        task, table = message.task, message.table
        if not self.adapters.can_read or (task is not None and table is not None):
            return None  # which is refused
        if task is not None and not task.num_rows:
            before = (each.message.task for each in self._arrivals)
            is_read = any(each is not None and each.task_id == task.task_id for each in before)
            return _Arrival(bridge, message) if is_read else None
        given = task.weights if task is not None else b"" if table is None else table.rows
        if task is None and len(given) <= _AT_ONCE:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "weights")
        weights = self._threads.submit(self.adapters.read_weights, message)
        return _Arrival(bridge, message, len(given), weights)

    def cancel(
        self,
        bridge: bytes,
        request: int,
        cause: CancelCause = CancelCause.CLIENT,
        noticed_ns: int = 0,
    ) -> bool:
        """End a request; one that waits for weights when they are there. See `Engine.cancel`."""
        found = self._find(bridge, request)
        if found is None:
            return super().cancel(bridge, request, cause, noticed_ns)
        found.cancel = cause, noticed_ns
        return True

    def step(self) -> dict[bytes, list[Tokens]]:
        """Submit what has been read; then see `Engine.step`."""
        while self._arrivals and _is_done(self._arrivals[0]):
            self._enter(self._arrivals.popleft())
        if super().has_work:
            return super().step()
        if self._arrivals and not self._rejected:
            first = self._arrivals[0].weights
            assert first is not None, "what names a task waits behind it"
            wait([first], _WAIT_S, FIRST_COMPLETED)
        return {}

    def _enter(self, arrival: _Arrival) -> None:
        message, weights = arrival.message, arrival.weights
        try:
            if weights is None:
                super().submit(arrival.bridge, message)
            else:
                with self.adapters.having(weights):
                    super().submit(arrival.bridge, message)
        except ContractError as error:
            refused = Rejected(message.request, error.code, error.message, error.reason)
            self._rejected.append((arrival.bridge, refused))
            return
        if arrival.cancel is not None:
            super().cancel(arrival.bridge, message.request, *arrival.cancel)

    def take_rejected(self) -> list[tuple[bytes, Rejected]]:
        """Return requests, by bridge, that turned out since the last call not to be servable."""
        found = [*self._rejected, *super().take_rejected()]
        self._rejected = []
        return found

    def check_integrity(self) -> None:
        """Assert what must hold between steps; see `Engine.check_integrity`."""
        super().check_integrity()
        keys = [(each.bridge, each.message.request) for each in self._arrivals]
        assert len({*keys}) == len(keys)
        assert not any(super(ReadingEngine, self).has_request(*key) for key in keys)

    def _find(self, bridge: bytes, request: int) -> _Arrival | None:
        found = (e for e in self._arrivals if e.bridge == bridge and e.message.request == request)
        return next(found, None)


def _is_done(arrival: _Arrival) -> bool:
    return arrival.weights is None or arrival.weights.done()
