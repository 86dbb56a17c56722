"""The gateway's end of an engine: submits go out, each step's tokens reach their exchanges."""

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from slipstream import wire
from slipstream.bridge.connection import Connection
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.admission import LoadFile, path_of
from slipstream_runtime.directory import Runtime
from slipstream_runtime.failed_starts import RESTARTED
from slipstream_runtime.processes import num_cores

from slipstream_gateway.errors import ApiError, api_error
from slipstream_gateway.exchange import Exchange

_log = logging.getLogger(__name__)

BRIDGE = "openai"  # the engine's name for this connection
_LOST = ApiError(503, "a message of the engine was lost; try again", retry_after_ms=50)
_GONE = ApiError(503, "the engine ended; try again", retry_after_ms=1000)


class Pace(NamedTuple):
    """How far apart rounds of writing are."""

    share: float  # of a core, that writing may take
    longest_s: float  # between two rounds, whatever they cost


FEW_CORES = Pace(0.22, 0.025)  # clients and engine need them more: delay buys processor time
MANY_CORES = Pace(0.5, 0.005)
PACE = FEW_CORES if num_cores() <= 4 else MANY_CORES


class Route(NamedTuple):
    """Where the tokens of an engine's request go; its sequence 0 is answer `first`."""

    exchange: Exchange
    first: int


class EngineClient:
    """The connection to one engine and its successors.

    The event loop's thread calls it, but for the methods of the `Listener`.

    Attributes:
        routes: number of each request that runs -> where its tokens go.
    """

    def __init__(
        self,
        runtime: Runtime,
        loop: asyncio.AbstractEventLoop,
        keep_alive: Callable[[], None],
        max_unanswered: int = 90,
        keeps_engine: bool = True,
        outage: Callable[[], str] = lambda: RESTARTED,
    ) -> None:
        """Start to connect; `keep_alive` has an engine started where there is none.

        `outage` says, in one line, why there is none.
        `keeps_engine`: whether the engine goes on for this connection alone.
        """
        self.routes: dict[int, Route] = {}
        self.num_tokens = 0  # ever received
        self._loop = loop
        self._numbers = itertools.count(1)
        self._load = LoadFile(path_of(runtime.socket))
        self._events: deque[Callable[[dict[Exchange, None]], None]] = deque()
        self._lock = threading.Lock()  # guards `_is_due`
        self._is_due = False
        self._touched: dict[Exchange, None] = {}  # with something to write
        self._timer: asyncio.TimerHandle | None = None  # of the next round of writing
        self._next_s = 0.0  # its earliest time, by the event loop
        self.connection = Connection(
            runtime.address,
            BRIDGE,
            self,
            keep_alive,
            max_unanswered,
            keeps_engine,
            outage=outage,
        )

    # --- to the engine -------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return a number for a `Submit`."""
        return next(self._numbers)

    def raise_if_full(self, num_tokens: int = 0) -> None:
        """Raise ContractError if the engine has published that it would refuse such a prompt."""
        self._load.raise_if_full(num_tokens)

    def start(self, exchange: Exchange, submits: list[wire.Submit]) -> None:
        """Send the requests of an exchange. Raises ContractError if there is no engine."""
        first = 0
        for submit in submits:
            self.routes[submit.request] = Route(exchange, first)
            first += submit.sampling.n
        try:
            self.connection.send(*submits)
        except ContractError:
            self._remove(submits)
            raise
        exchange.requests = [submit.request for submit in submits]

    def close_exchange(self, exchange: Exchange, cause: wire.CancelCause | None) -> None:
        """Remove the routes of an exchange; cancel its requests that still run, if any may."""
        running = [number for number in exchange.requests if self.routes.pop(number, None)]
        if cause is None or not running:
            return
        now_ns = time.monotonic_ns()
        try:
            self.connection.send(*(wire.Cancel(number, cause, now_ns) for number in running))
        except ContractError:
            _log.debug("nothing to cancel: there is no engine")

    def welcome(self) -> wire.Welcome | None:
        """Return what the engine said of itself; None while there is none."""
        try:
            return self.connection.wait_welcome(0)
        except ContractError:
            return None

    def close(self) -> None:
        """End the connection, and with it all requests."""
        self.connection.close()

    def _remove(self, submits: Iterable[wire.Submit]) -> None:
        for submit in submits:
            self.routes.pop(submit.request, None)

    # --- from the engine, in the connection's thread --------------------------------------------

    def take(self, outputs: wire.StepOutputs) -> None:
        """Pass on a step's tokens."""
        self._post(lambda touched: self._put(outputs, touched))

    def reject(self, rejected: wire.Rejected) -> None:
        """Pass on a refusal."""
        error = ContractError(rejected.message, Code(rejected.code), rejected.reason)
        self._post(lambda _: self._fail([rejected.request], error, is_running=False))

    def lose_messages(self, requests: Iterable[int]) -> None:
        """Pass on that some requests lost a message."""
        numbers = list(requests)
        self._post(lambda _: self._fail(numbers, _LOST))

    def lose_engine(self, kept: Set[int]) -> None:
        """Pass on that the engine is gone; requests `kept` go to the next one."""
        self._post(
            lambda _: self._fail([number for number in self.routes if number not in kept], _GONE)
        )

    def is_waiting_for(self, request: int) -> bool:
        """Return whether an exchange waits for the tokens of a request."""
        return request in self.routes

    def _post(self, event: Callable[[dict[Exchange, None]], None]) -> None:
        self._events.append(event)
        with self._lock:
            is_due, self._is_due = self._is_due, True
        if not is_due:
            try:
                self._loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # the event loop has been closed
                _log.debug("a message of the engine comes too late")

    # --- in the event loop's thread --------------------------------------------------------------

    def _run(self) -> None:
        """Handle all that has come, and write what is urgent; the rest when a round is due.

        A round writes once for each exchange that has something new. Its cost is that of its
        writes, so tokens are joined where rounds would take more than a share of a core (`PACE`): a
        few milliseconds on a slow machine with hundreds of streams, and nothing for a few.
        """
        with self._lock:
            self._is_due = False
        begin_s = time.thread_time()
        touched = self._touched
        while self._events:
            self._events.popleft()(touched)
        if self._loop.time() >= self._next_s:
            self._touched = {}
            for exchange in touched:
                self.flush(exchange)
        else:
            for exchange in [each for each in touched if each.is_urgent]:
                del touched[exchange]
                self.flush(exchange)
            if touched and self._timer is None:
                self._timer = self._loop.call_at(self._next_s, self._write)
        self._delay(time.thread_time() - begin_s)

    def _write(self) -> None:
        """Write a round that had to wait."""
        self._timer = None
        begin_s = time.thread_time()
        touched, self._touched = self._touched, {}
        for exchange in touched:
            self.flush(exchange)
        self._delay(time.thread_time() - begin_s)

    def _delay(self, cost_s: float) -> None:
        """Put off the next round after work that cost so much processor time."""
        now_s = self._loop.time()
        due_s = max(self._next_s, now_s) + cost_s / PACE.share
        self._next_s = min(due_s, now_s + PACE.longest_s)

    def flush(self, exchange: Exchange) -> None:
        """Write what an exchange has; a fault in it ends this exchange alone."""
        try:
            exchange.flush()
        except Exception:
            _log.exception("a response could not be written")
            exchange.fail(ApiError(500, "the response could not be made"))

    def _put(self, outputs: wire.StepOutputs, touched: dict[Exchange, None]) -> None:
        routes = self.routes
        for tokens in outputs.tokens:
            route = routes.get(tokens.request)
            if route is None:
                continue  # cancelled meanwhile
            self.num_tokens += len(tokens.token_ids)
            route.exchange.put(route.first + tokens.index, tokens)
            touched[route.exchange] = None

    def _fail(
        self, numbers: list[int], error: ContractError | ApiError, is_running: bool = True
    ) -> None:
        for number in numbers:
            route = self.routes.get(number)
            if route is None:
                continue
            if not is_running:
                del self.routes[number]
            exchange = route.exchange
            own = api_error(error, exchange.fields) if isinstance(error, ContractError) else error
            exchange.fail(own)
