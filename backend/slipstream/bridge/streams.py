"""Track calls in flight: their request, the mailboxes of their responses, and their single end.

A `Call` is one Triton request, a `Stream` one series of responses in it. Every call ends exactly
once, by what comes first: its last tokens, a cancel, an error, or the loss of the engine.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

import msgspec
import numpy as np
from slipstream_contract.errors import Code, ContractError

from slipstream import wire
from slipstream.bridge.tally import Tally

_log = logging.getLogger(__name__)

_LINGER_S = 0.1  # from a cancel until the server gets the end

Outputs = Mapping[str, np.ndarray]


class Reply(Protocol):
    """The receiver of a call's responses. Nothing may follow a final one."""

    @property
    def is_probe(self) -> bool:
        """Whether the request is a probe's, not a client's."""

    def send(self, outputs: Outputs, is_final: bool) -> None:
        """Send one response."""

    def fail(self, error: ContractError) -> None:
        """Send an error, final."""

    def end(self) -> None:
        """End without a response."""

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled."""


class Credit(Protocol):
    """The flow control of one stream, see `flow`."""

    @property
    def slot(self) -> int:
        """The stream's place in the credit file."""

    @property
    def next_number(self) -> int:
        """The number of the response that is written next."""

    def enter(self, is_urgent: bool) -> bool:
        """Return whether the stream may send now. If not, it is handed over when its turn comes."""

    def leave(self) -> None:
        """Note that the stream sends nothing more."""

    def spend(self, send: Callable[[], None]) -> None:
        """Send one response; the stream must then wait until the credit comes back."""

    def release(self) -> None:
        """Note that the stream has ended."""


class Writer(Protocol):
    """Makes responses of a stream's tokens. One thread at a time calls it."""

    def write(self, tokens: list[wire.Tokens], is_last: bool, credit: Credit | None) -> Outputs:
        """Return the next response: all tokens since the one before."""


class Stream:
    """A mailbox: tokens that were received and not yet sent, in order.

    At most one sender has a stream at a time; it is taken then.
    """

    def __init__(self, writer: Writer, is_streaming: bool, num_sequences: int = 1) -> None:
        """Make a mailbox; not streaming, it has one response, when all its sequences have ended."""
        self.credit: Credit | None = None
        self.call: Call | None = None
        self.has_sent = False
        self._writer = writer
        self.is_streaming = is_streaming
        self._num_running = num_sequences
        self._lock = threading.Lock()  # guards the two below
        self._pending: list[wire.Tokens] = []
        self._is_taken = False

    def put(self, tokens: wire.Tokens) -> bool:
        """Add tokens; return True if the caller must hand the stream, now taken, to a sender."""
        finished = tokens.finished
        if finished is not None and finished.reason is wire.FinishReason.DEADLINE:
            tokens = msgspec.structs.replace(tokens, finished=None)  # the call's error reports it
        with self._lock:
            if tokens.beams is not None:
                self._pending.clear()  # they hold all that came before
            self._pending.append(tokens)
            if finished is not None:
                self._num_running -= 1
            if self._is_taken or not (self.is_streaming or self._num_running == 0):
                return False
            self._is_taken = True
            return True

    @property
    def is_complete(self) -> bool:
        """Whether the engine has sent all of the stream."""
        return self._num_running == 0

    @property
    def is_urgent(self) -> bool:
        """Whether the next response is the first or the last one."""
        return not self.has_sent or self.is_complete

    def take(self) -> tuple[list[wire.Tokens], bool]:
        """Return pending tokens, and whether they are the last. Only for the stream's sender."""
        with self._lock:
            tokens, self._pending = self._pending, []
            return tokens, self._num_running == 0

    def write(self, tokens: list[wire.Tokens], is_last: bool, is_final: bool) -> Outputs:
        """Return one response. Only for the stream's sender.

        No credit is given with the call's final response, which nothing acknowledges.
        """
        return self._writer.write(tokens, is_last, None if is_final else self.credit)

    def release(self) -> bool:
        """Give the stream back; return False if there is more to send and the caller keeps it."""
        with self._lock:
            self._is_taken = bool(self._pending)
            return not self._is_taken


class Call:
    """A Triton request, and everything that runs for it."""

    def __init__(self, reply: Reply, request_id: str, is_step: bool = False) -> None:
        """Make a call without requests; `is_step`: an ensemble's, without notice of cancels."""
        self.reply = reply
        self.request_id = request_id
        self.is_step = is_step
        self.start_s = time.monotonic()
        self.is_over = False
        self.is_failing = False  # an error waits to be sent: no more responses
        self.expiry: ContractError | None = None  # sent after all tokens
        self.deadline_ns = 0  # time.monotonic_ns(); the engine enforces it; 0: none
        self.timeout_ns = 0  # the timeout that it was computed from
        self.lock = threading.Lock()  # taken while sending: responses of a call are in order
        self.routes: dict[int, tuple[Stream, ...]] = {}  # request -> stream of each sequence
        self.rejected: set[int] = set()  # requests that the engine refused
        self.streams: list[Stream] = []
        self.num_open = 0  # streams without their last response

    def add(self, request: int, streams: Iterable[Stream]) -> None:
        """Add a request before the call is opened; several of its sequences may share a stream."""
        self.routes[request] = tuple(streams)
        for stream in dict.fromkeys(self.routes[request]):
            stream.call = self
            self.streams.append(stream)
            self.num_open += 1


class Calls:
    """All calls of a bridge, by the engine's request numbers and by the clients' request ids."""

    def __init__(self, send: Callable[..., None], hand_over: Callable[[Stream], None]) -> None:
        """Start empty; `send` passes messages to the engine, `hand_over` streams to the senders."""
        # Runs a function once nothing of a call is on its way to postprocessing (see `flow`).
        self.settle: Callable[[Call, Callable[[], None]], None] | None = None
        self.clients, self.probes = Tally(), Tally()
        self._send = send
        self._hand_over = hand_over
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the two below
        self._routes: dict[int, Call] = {}
        self._ids: dict[str, Call] = {}
        # Cancelled calls, earliest first: when to end, and the error if any.
        self._cancelled: deque[tuple[float, Reply, ContractError | None]] = deque()

    def next_request(self) -> int:
        """Return a number for a `Submit`."""
        return next(self._numbers)

    def open(self, call: Call) -> None:
        """Register a call, with all that was added to it, before its requests are sent.

        Raises ContractError if a call with the same request id is running.
        """
        with self._lock:
            if call.request_id:
                if call.request_id in self._ids:
                    raise ContractError(
                        f"request id {call.request_id!r:.64} is already running",
                        Code.ALREADY_EXISTS,
                    )
                self._ids[call.request_id] = call
            for request in call.routes:
                self._routes[request] = call
            self.tally(call.reply).num_calls += 1

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return not self._routes

    def snapshot(self) -> list[Call]:
        """Return the calls that are running now."""
        with self._lock:
            return list(dict.fromkeys(self._routes.values()))

    def tally(self, reply: Reply) -> Tally:
        """Return the counters for a call with this reply."""
        return self.probes if reply.is_probe else self.clients

    def find(self, request_id: str) -> Call | None:
        """Return the running call with that request id."""
        with self._lock:
            return self._ids.get(request_id)

    # --- from the engine -----------------------------------------------------------------------

    def take(self, outputs: wire.StepOutputs) -> None:
        """Put tokens into their mailboxes."""
        routes, hand_over = self._routes, self._hand_over
        for tokens in outputs.tokens:
            request, finished = tokens.request, tokens.finished
            call = routes.get(request)
            if call is None:
                continue  # cancelled meanwhile
            self.tally(call.reply).num_tokens += len(tokens.token_ids)
            if finished is not None and tokens.beams is not None:
                self.tally(call.reply).num_tokens += finished.num_output_tokens
            if finished is not None and finished.reason is wire.FinishReason.ERROR:
                message = finished.error or "the engine failed"
                code = Code.INVALID_ARGUMENT if finished.is_refusal else Code.INTERNAL
                self.fail(call, ContractError(message, code))
                continue
            if finished is not None and finished.reason is wire.FinishReason.DEADLINE:
                message = finished.error or "the request took too long"
                call.expiry = ContractError(message, Code.DEADLINE_EXCEEDED)
            streams = call.routes.get(request)
            if streams and streams[tokens.index].put(tokens):  # else the call has just ended
                hand_over(streams[tokens.index])

    def reject(self, rejected: wire.Rejected) -> None:
        """End the call of a request that the engine refuses."""
        call = self._routes.get(rejected.request)
        if call is not None:
            error = ContractError(rejected.message, Code(rejected.code), rejected.reason)
            call.rejected.add(rejected.request)
            self.tally(call.reply).count_refusal(error)
            self.fail(call, error)

    def lose_messages(self, requests: Iterable[int]) -> None:
        """End the calls of requests of which a message of the engine was lost."""
        error = ContractError("a message of the engine was lost; try again", Code.UNAVAILABLE)
        for call in filter(None, map(self._routes.get, requests)):
            self.fail(call, error)

    def lose_engine(self, kept: Set[int] = frozenset()) -> None:
        """End every call that has a request not in `kept`: its engine is gone."""
        error = ContractError("the engine ended; try again", Code.UNAVAILABLE)
        for call in self.snapshot():
            if not call.routes.keys() <= kept:
                self.fail(call, error, wire.CancelCause.SERVER)

    def is_waiting_for(self, request: int) -> bool:
        """Return whether a call waits for the tokens of a request."""
        call = self._routes.get(request)
        return call is not None and not (call.is_over or call.is_failing)

    # --- ends ----------------------------------------------------------------------------------

    def fail_all(self, error: ContractError) -> None:
        """End every call with the same error, caused by the server."""
        for call in self.snapshot():
            self.fail(call, error, wire.CancelCause.SERVER)

    def fail(
        self,
        call: Call,
        error: ContractError,
        cause: wire.CancelCause = wire.CancelCause.FAILED,
    ) -> None:
        """End a call with an error, unless it is over.

        Under flow control the error waits for responses under way: servers before Triton 26.03
        never release an ensemble in which one step fails while another is at work.
        """
        with call.lock:
            if call.is_over or call.is_failing:
                return
            is_under_way = any(stream.credit and stream.has_sent for stream in call.streams)
            if self.settle is None or not is_under_way:
                self._abandon(call, cause)
                call.reply.fail(error)
                return
            call.is_failing = True
            self._cancel_in_engine(call, cause)
        self.settle(call, lambda: self._fail_settled(call, error))

    def _fail_settled(self, call: Call, error: ContractError) -> None:
        with call.lock:
            if not call.is_over:
                self._close(call)
                call.reply.fail(error)

    def cancel(
        self,
        call: Call,
        error: ContractError | None = None,
        cause: wire.CancelCause = wire.CancelCause.CLIENT,
    ) -> None:
        """End a call whose client has left; with an error if that is not certain.

        The server gets the end `_LINGER_S` later, by `end_cancelled`: servers before 25.05 release
        a call twice, and crash, if it ends before they know how the writing of its last response
        went.
        """
        with call.lock:
            if not call.is_over:
                self._abandon(call, cause)
                self._cancelled.append((time.monotonic() + _LINGER_S, call.reply, error))

    def end_if_cancelled(self, call: Call) -> bool:
        """End a call if its client has left; return whether it had. A round trip to the server."""
        with call.lock:
            is_gone = not call.is_over and call.reply.is_cancelled()
        if is_gone:
            self.cancel(call)
        return is_gone

    def end_cancelled(self, now_s: float) -> None:
        """End cancelled calls whose time has come; by one thread at a time."""
        while self._cancelled and self._cancelled[0][0] <= now_s:
            _, reply, error = self._cancelled.popleft()
            if error is None:
                reply.end()
            else:
                reply.fail(error)

    def stop(self, request_id: str) -> None:
        """Have the engine stop the call with that id, if it runs; it answers with what it has."""
        call = self.find(request_id)
        if call is not None:
            self._cancel_in_engine(call, wire.CancelCause.STOP)

    def remove(self, call: Call) -> None:
        """Unregister a call: its request id is free again, and tokens that still come are dropped.

        The references between call and streams are cut, so that none waits for the garbage
        collector.
        """
        with self._lock:
            for request in call.routes:
                self._routes.pop(request, None)
            if self._ids.get(call.request_id) is call:
                del self._ids[call.request_id]
        for stream in call.streams:
            credit, stream.credit = stream.credit, None
            if credit is not None:
                credit.release()
        call.streams.clear()
        call.routes.clear()

    def _close(self, call: Call) -> None:
        call.is_over = True
        self.remove(call)

    def _abandon(self, call: Call, cause: wire.CancelCause) -> None:
        self._cancel_in_engine(call, cause)
        self._close(call)

    def _cancel_in_engine(self, call: Call, cause: wire.CancelCause) -> None:
        now_ns, requests = time.monotonic_ns(), call.routes.keys() - call.rejected
        if requests:
            with contextlib.suppress(ContractError):  # no engine: nothing to cancel
                self._send(*(wire.Cancel(request, cause, now_ns) for request in sorted(requests)))
