"""Connect a bridge to the engine: a DEALER socket, and a thread that receives and reconnects.

This module knows nothing of Triton or of calls: messages go in by `send` and out to a `Listener`.

`send` writes to the socket in the caller's thread: waking another thread, which then needs the
interpreter that the first one still uses, would cost a first token 0.3 ms. ZeroMQ lets one thread
use a socket at a time, so a lock guards it, which is never kept while waiting: the receiving thread
waits for the socket's descriptor instead.
"""

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

import msgspec
import zmq
import zmq.utils.monitor
from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.failed_starts import RESTARTED

from slipstream import __version__, wire
from slipstream.bridge.cores import stay_together
from slipstream.bridge.ledger import Ledger

_log = logging.getLogger(__name__)

_POLL_MS = 250
_RETRY_S = 0.2  # between two attempts to connect
_REFUSED_RETRY_S = 2.0
_PING_S = 1.0
_LINGER_MS = 2000  # a `Bye` that is lost leaves the engine running
_KEEP_S = 20.0  # for this long, requests wait for the next engine


class Listener(Protocol):
    """The receiver of messages; called in the connection's thread, must not block."""

    def take(self, outputs: wire.StepOutputs) -> None:
        """Take new tokens."""

    def reject(self, rejected: wire.Rejected) -> None:
        """Take note of a request that the engine refuses."""

    def lose_messages(self, requests: Iterable[int]) -> None:
        """Take note of requests of which a message was lost between bridge and engine."""

    def lose_engine(self, kept: Set[int]) -> None:
        """Take note that the engine is gone, and with it all requests except those `kept`.

        The engine had sent nothing for the kept ones; they are submitted to the next engine.
        """

    def is_waiting_for(self, request: int) -> bool:
        """Return whether the tokens of a request are still wanted."""


class Connection:
    """The connection to one engine, and to its successors. Thread-safe."""

    def __init__(
        self,
        address: str,
        bridge: str,
        listener: Listener,
        keep_alive: Callable[[], None],
        max_unanswered: int = 90,
        keeps_engine: bool = True,
        prefix_key: bytes = b"",
        take_prefixes: Callable[[wire.Prefixes], None] | None = None,
        outage: Callable[[], str] = lambda: RESTARTED,
    ) -> None:
        """Start to connect.

        Args:
            address: of the engine's ROUTER.
            bridge: name under which the engine knows this connection.
            listener: receives all messages.
            keep_alive: called about once a second while there is no engine; has one started. Its
                exceptions are logged.
            max_unanswered: pings, one a second, after which a silent engine is given up. It is a
                number, not a time: while a machine's processes are suspended, none is stuck.
            keeps_engine: whether the engine goes on for this connection alone.
            prefix_key: see `wire.Hello`; it may be changed for the next engine.
            outage: says, in one line, why there is no engine.
            take_prefixes: receives what the engine's cache has, if there is a key.
        """
        self.prefix_key = prefix_key
        self._take_prefixes = take_prefixes
        self._outage = outage
        self.status: wire.Status | None = None  # the latest
        self.heard_s = -math.inf  # when the last message came, by time.monotonic()
        # Of the engine, by name. None: no engine is connected, so nobody knows its adapters.
        self.adapters: Mapping[str, wire.AdapterInfo] | None = None
        self.num_dropped = 0  # frames that were not messages
        self._address = address
        self._hello = wire.Hello(wire.PROTOCOL, __version__, bridge, os.getpid(), keeps_engine)
        self._listener = listener
        self._keep_alive = keep_alive
        self._max_unanswered = max_unanswered
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._changed = threading.Condition()  # guards the seven below, and the socket
        self._welcome: wire.Welcome | None = None
        self._refusal: str | None = None
        self._waiters: dict[int, queue.SimpleQueue[wire.Status | wire.Answered]] = {}
        self._is_closing = False
        self._socket: zmq.Socket[bytes] | None = None
        self._ledger = Ledger()
        # Requests submitted a second time; never again, as one of them may be the cause.
        self._retried: frozenset[int] = frozenset()
        self._numbers = itertools.count(1)
        self._kept: list[wire.Submit] = []  # requests for the next engine
        self._kept_until_s = 0.0
        self._num_unanswered = 0  # pings since the engine's last message
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="connection", daemon=True)
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> wire.Welcome | None:
        """Return the engine's `Welcome`, or None if it does not come in time.

        Raises ContractError if the engine refuses this bridge.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._welcome or self._refusal, timeout_s)
            if self._refusal is not None:
                raise ContractError(self._refusal, Code.UNAVAILABLE)
            return self._welcome

    def send(self, *messages: wire.ToEngine) -> None:
        """Send messages, all or none; never blocks. Raises ContractError without an engine."""
        frames = [(wire.encode(message), message) for message in messages]
        with self._changed:
            if self._welcome is None or self._socket is None:
                raise ContractError(self._outage(), Code.UNAVAILABLE, "engine_down")
            for frame, message in frames:
                self._post(self._socket, frame, message)
            has_come = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if has_come:  # its descriptor signals only once, and has done so here
            os.eventfd_write(self._wake, 1)

    def request_status(
        self, timeout_s: float, with_figures: bool = False, with_adapters: bool = False
    ) -> wire.Status:
        """Return the engine's state now. Raises ContractError if it does not answer in time."""
        number = next(self._numbers)
        answer = self._ask(wire.Ping(number, with_figures, with_adapters), timeout_s)
        assert isinstance(answer, wire.Status), "numbers are used once"
        return answer

    def load_adapter(self, name: str, path: str, timeout_s: float) -> None:
        """Have an adapter loaded. Raises ContractError, also without an answer in time."""
        self._change(wire.LoadAdapter(next(self._numbers), name, path), timeout_s)

    def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Have an adapter's name discarded. Raises ContractError, also without an answer."""
        self._change(wire.UnloadAdapter(next(self._numbers), name), timeout_s)

    def _change(self, message: wire.LoadAdapter | wire.UnloadAdapter, timeout_s: float) -> None:
        answer = self._ask(message, timeout_s)
        assert isinstance(answer, wire.Answered), "numbers are used once"
        if answer.code:
            raise ContractError(answer.message, Code(answer.code))

    def _ask(
        self, message: wire.Ping | wire.LoadAdapter | wire.UnloadAdapter, timeout_s: float
    ) -> wire.Status | wire.Answered:
        """Send a message and wait for its answer. Raises ContractError without one in time."""
        number = message.number
        answer: queue.SimpleQueue[wire.Status | wire.Answered] = queue.SimpleQueue()
        with self._changed:
            self._waiters[number] = answer
        try:
            self.send(message)
            return answer.get(timeout=timeout_s)
        except queue.Empty:
            late = f"the engine did not answer within {timeout_s:g} s"
            raise ContractError(late, Code.UNAVAILABLE) from None
        finally:
            with self._changed:
                self._waiters.pop(number, None)

    def close(self) -> None:
        """Send `Bye` and end the thread. The caller has to end requests in flight first."""
        with self._changed:
            self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.destroy(_LINGER_MS)
        os.close(self._wake)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        stay_together()
        while not self._is_closing:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            socket.set_hwm(0)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._num_unanswered = 0
            with self._changed:
                self._socket, self._ledger, self._refusal = socket, Ledger(), None
            try:
                with self._changed:
                    socket.connect(self._address)
                    hello = msgspec.structs.replace(self._hello, prefix_key=self.prefix_key)
                    socket.send(wire.encode(hello))
                self._serve(socket, monitor)
                with self._changed:
                    if self._is_closing and self._welcome is not None:
                        socket.send(wire.encode(wire.Bye()))
            except Exception:
                _log.exception("the connection to the engine failed")
            finally:
                self._disconnect()  # after this, no other thread uses the socket
                socket.disable_monitor()
                socket.close(_LINGER_MS if self._is_closing else 0)
            if not self._is_closing:
                time.sleep(_RETRY_S if self._refusal is None else _REFUSED_RETRY_S)

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Receive until the engine is gone or the connection is being closed."""
        poller = zmq.Poller()
        for source in (socket.FD, monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        next_s = 0.0
        while not self._is_closing:
            self._receive(socket)  # until nothing is left: only then the descriptor signals again
            ready = dict(poller.poll(_POLL_MS))
            if monitor in ready:
                zmq.utils.monitor.recv_monitor_message(monitor)
                self._receive(socket)  # its last messages
                _log.warning("the engine is gone")
                return
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._refusal is not None:
                return
            now = time.monotonic()
            if now >= next_s:
                next_s = now + _PING_S
                if self._welcome is None:
                    if self._kept and now > self._kept_until_s:
                        self._give_up()
                    self._try_keep_alive()
                elif self._num_unanswered >= self._max_unanswered:
                    _log.error("%d pings without a word: connecting anew", self._num_unanswered)
                    return
                else:
                    self._ping(socket)

    def _ping(self, socket: zmq.Socket[bytes]) -> None:
        number = next(self._numbers)
        with self._changed:
            socket.send(wire.encode(wire.Ping(number)))
            self._ledger.note_ping(number)
        self._num_unanswered += 1

    def _try_keep_alive(self) -> None:
        try:
            self._keep_alive()
        except Exception as error:
            _log.error("the engine cannot be started: %s", error)

    def _post(self, socket: zmq.Socket[bytes], frame: bytes, message: wire.ToEngine) -> None:
        """Send one message; the caller has the lock."""
        if isinstance(message, wire.Submit):
            self._ledger.add(message, message.request not in self._retried)
        socket.send(frame)  # the queue is unbounded: it does not block

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        """Receive all messages that have come."""
        while True:
            try:
                with self._changed:
                    frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._num_unanswered, self.heard_s = 0, time.monotonic()
            try:
                message = wire.decode_bridge(frame)
            except (msgspec.DecodeError, ValueError, RecursionError):
                self.num_dropped += 1
                continue
            try:
                self._handle(socket, message)
            except Exception:  # one message must not break the connection for all
                _log.exception("a %s message could not be used", type(message).__name__)

    def _handle(self, socket: zmq.Socket[bytes], message: wire.BridgeMessage) -> None:
        match message:
            case wire.StepOutputs():
                self._take(message)
            case wire.Rejected():
                self._listener.reject(message)
                with self._changed:
                    self._ledger.remove(message.request)
            case wire.Status():
                self.status = message
                self._compare(socket, message)
                self._answer(message)
            case wire.Adapters():
                self.adapters = message.onto(self.adapters or {})
            case wire.Answered():
                self._answer(message)
            case wire.Prefixes():
                if self._take_prefixes is not None:
                    self._take_prefixes(message)
            case wire.Welcome():
                _log.info(
                    "connected to the engine of %s, process %d", message.model, message.engine_pid
                )
                self.adapters = wire.Adapters(message.adapters).onto({})
                with self._changed:
                    self._welcome, self._refusal = message, None
                    self._submit_again(socket)  # before any of them is cancelled
                    self._changed.notify_all()
            case wire.Refused():
                _log.error("the engine refuses this bridge: %s", message.reason)
                with self._changed:
                    self._refusal = message.reason
                    self._changed.notify_all()

    def _answer(self, message: wire.Status | wire.Answered) -> None:
        """Pass on an answer to the thread that waits for it, if any does."""
        with self._changed:
            waiter = self._waiters.pop(message.number, None)
        if waiter is not None:
            waiter.put(message)

    def _take(self, outputs: wire.StepOutputs) -> None:
        with self._changed:
            right, lost = self._ledger.take(outputs)
        self._miss(lost)
        if len(right) < len(outputs.tokens):
            self.num_dropped += 1
            outputs = msgspec.structs.replace(outputs, tokens=right)
        self._listener.take(outputs)

    def _compare(self, socket: zmq.Socket[bytes], status: wire.Status) -> None:
        with self._changed:
            lost, strays = self._ledger.compare(status)
            for request in strays:  # from a repeated `Submit`, after the first had ended
                socket.send(wire.encode(wire.Cancel(request, wire.CancelCause.BRIDGE)))
        self._miss(lost)

    def _miss(self, lost: set[int]) -> None:
        if lost:
            _log.error("%d requests lost a message between bridge and engine", len(lost))
            self._listener.lose_messages(lost)

    def _disconnect(self) -> None:
        with self._changed:  # `send` refuses from here on; what it sent is in the ledger
            was_welcome, self._welcome = self._welcome is not None, None
            self._socket = None
            unanswered = self._ledger.unanswered()
        self.status = self.adapters = None
        if was_welcome:
            self._kept = [] if self._is_closing else unanswered
            self._kept_until_s = time.monotonic() + _KEEP_S
            self._listener.lose_engine({message.request for message in self._kept})
        elif self._kept and (self._is_closing or self._refusal is not None):
            self._give_up()

    def _submit_again(self, socket: zmq.Socket[bytes]) -> None:
        again = [
            message for message in self._kept if self._listener.is_waiting_for(message.request)
        ]
        self._kept = []
        self._retried = frozenset(message.request for message in again)
        for message in again:
            self._post(socket, wire.encode(message), message)
        if again:
            _log.info("%d requests without a token so far are submitted to this engine", len(again))

    def _give_up(self) -> None:
        self._kept = []
        self._listener.lose_engine(frozenset())
