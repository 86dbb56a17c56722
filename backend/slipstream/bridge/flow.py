"""Control flow and cancels through a Triton ensemble: the bridge's side of the credit file.

The next response of a stream is sent when `postprocessing` has acknowledged the last one. The
server reports a client that has left to `postprocessing` only, which gets the cancelled request and
writes that into the credit file.

With a queue in front of `postprocessing` the server drops such a request, and its acknowledgement
never comes. Requests are taken in the order of sending. So a process of `postprocessing` does not
have a given request if it has acknowledged a later one, has been alive and idle for a while, or has
died. A request was dropped if this holds for every process; time alone never decides while a
process is busy or suspended. A process that is killed after the server has its response, but before
it acknowledges, leaves the same traces as a client that has left. So such a stream ends with an
error, which a client that has left does not see.

Only a limited number of responses of all streams is under way at once (the window): what waits here
still takes up new tokens, what waits in the server's queue does not. First and last responses do
not wait.

An ensemble assembles a response from its steps' outputs in the order in which they come. So the
streams of one call, which several processes might answer at once, take turns.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream_contract.errors import Code, ContractError
from slipstream_runtime.credit import NUM_SLOTS, CreditFile

from slipstream.bridge.cores import stay_together
from slipstream.bridge.streams import Call, Stream

_log = logging.getLogger(__name__)

_NUMBER_BITS = 24  # for the responses of one stream; the bits above identify the stream
_POLL_S = 0.001
_WINDOW = 32  # responses under way; more would only wait in the server's queue
_PROBE_NS = 20_000_000  # a window without progress for this long lets one more in
_DROP_NS = 400_000_000
_SETTLE_NS = 100_000_000  # from an acknowledgement until the server has that step's response
_MAX_SETTLE_NS = 1_000_000_000
_MAX_PAUSE_NS = 200_000_000  # between two polls; longer: this process was suspended
_LOST = "a part of the answer was lost, a process of postprocessing has ended; try again"


@dataclass
class Turn:
    """The stream of a call that may send now. Guarded by the lock of its flow."""

    holder: "SlotCredit | None" = None
    waiting: "deque[SlotCredit]" = field(default_factory=deque)

    def take(self, credit: "SlotCredit") -> bool:
        """Return whether it is this stream's turn; if not, it waits."""
        if self.holder not in (None, credit):
            self.waiting.append(credit)
            return False
        self.holder = credit
        return True

    def leave(self, credit: "SlotCredit") -> "SlotCredit | None":
        """Pass the turn on, if this stream has it; return the stream whose turn it is now."""
        if self.holder is not credit:
            return None
        self.holder = None
        while self.waiting and self.holder is None:
            following = self.waiting.popleft()
            self.holder = None if following.is_released else following
        return self.holder


class SlotCredit:
    """The credit of one stream. See `streams.Credit`."""

    def __init__(self, flow: "Flow", stream: Stream, slot: int, number: int, turn: Turn) -> None:
        self.stream = stream
        self.turn = turn
        self.number = number  # of the last response sent
        self.send_started = 0  # place of its last send in the order of all sends
        self.send_ended = 0
        self.send_ended_ns = 0  # time.monotonic_ns()
        self.is_under_way = False  # or about to be: it has a place in the window
        self.is_released = False
        self._flow = flow
        self._slot = slot

    @property
    def slot(self) -> int:
        """The stream's place in the credit file."""
        return self._slot

    @property
    def next_number(self) -> int:
        """The number of the response that is written next."""
        return self.number + 1

    def enter(self, is_urgent: bool) -> bool:
        """Return whether the stream may send now. If not, it is handed over when its turn comes."""
        return self._flow.enter(self, is_urgent)

    def leave(self) -> None:
        """Give up the stream's place in the window and its turn."""
        self._flow.leave(self)

    def spend(self, send: Callable[[], None]) -> None:
        """Send one response and watch for its acknowledgement."""
        self.number += 1
        self.send_started = self._flow.tick()
        self._flow.expect(self)
        send()
        self.send_ended = self._flow.tick()
        self.send_ended_ns = time.monotonic_ns()
        self._flow.watch(self)

    def release(self) -> None:
        """Give the slot back."""
        self._flow.release(self)


@dataclass
class _Settling:
    """A call that sends nothing more, and what to do when all it sent has arrived."""

    call: Call
    then: Callable[[], None]
    deadline_ns: int
    quiet_ns: int | None = None  # since when none of its responses is under way

    def is_ready(self, now_ns: int) -> bool:
        """Return whether everything has arrived, or it has taken too long."""
        is_quiet = self.quiet_ns is not None and now_ns - self.quiet_ns >= _SETTLE_NS
        return is_quiet or now_ns > self.deadline_ns


class Flow:
    """The credits of all streams of a bridge, and the thread that waits for them to come back."""

    def __init__(
        self,
        file: CreditFile,
        hand_over: Callable[[Stream], None],
        cancel: Callable[[Call, ContractError | None], None],
    ) -> None:
        """Start the thread.

        Args:
            file: the credit file.
            hand_over: passes a stream with pending tokens to the senders.
            cancel: ends a call; with an error if its client may still be there.
        """
        self.num_cancelled = 0
        self._file = file
        self._hand_over = hand_over
        self._cancel = cancel
        self._tick = itertools.count(1)
        self._lock = threading.Lock()  # guards slots and window
        self._slots = deque(range(NUM_SLOTS))  # free for longest first
        self._watched: dict[int, SlotCredit] = {}  # by slot: spent credits, oldest first
        self._num_under_way = 0
        self._waiting: deque[SlotCredit] = deque()  # for a place in the window
        self._settling: list[_Settling] = []
        self._newest: dict[int, int] = {}  # process -> `send_started` of its latest acknowledged
        self._moved_ns = 0  # when an acknowledgement was last seen, or one more was let in
        self._alive_ns = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="flow", daemon=True)
        self._thread.start()

    def open(self, stream: Stream, turn: Turn) -> SlotCredit:
        """Put a stream under flow control; the streams of one call share a turn.

        Raises ContractError if there are too many streams. The credit file notes that the server's
        view of the client was checked at this time.
        """
        with self._lock:
            if not self._slots:
                raise ContractError(f"more than {NUM_SLOTS} streams at once", Code.UNAVAILABLE)
            slot = self._slots.popleft()
            # Random, not counted: a client that sees its stream's numbers cannot guess another's.
            number = secrets.randbits(62 - _NUMBER_BITS) << _NUMBER_BITS
            self._file.note_check(slot, number, time.monotonic_ns())
            return SlotCredit(self, stream, slot, number, turn)

    def release(self, credit: SlotCredit) -> None:
        """Take a slot back. Once per credit."""
        with self._lock:
            self._watched.pop(credit.slot, None)
            self._slots.append(credit.slot)
            credit.is_released = True
        self.leave(credit)

    def enter(self, credit: SlotCredit, is_urgent: bool) -> bool:
        """Give a stream a place in the window if one is free or it is urgent; else it waits.

        Before that it waits for its turn.
        """
        with self._lock:
            if credit.is_under_way or credit.is_released:
                return True
            if not credit.turn.take(credit):
                return False
            if self._num_under_way >= _WINDOW and not is_urgent:
                self._waiting.append(credit)
                return False
            credit.is_under_way = True
            self._num_under_way += 1
            return True

    def leave(self, credit: SlotCredit) -> None:
        """Take back a stream's place in the window and its turn, and pass both on."""
        with self._lock:
            self._num_under_way -= credit.is_under_way
            credit.is_under_way = False
            entered = self._let_in(_WINDOW)
            following = credit.turn.leave(credit)
        for first in entered:
            self._hand_over(first.stream)
        if following is not None:
            self._hand_over(following.stream)

    def _let_in(self, size: int) -> list[SlotCredit]:
        """Fill the window up to a size, under the lock; return the streams to hand over."""
        entered = []
        while self._waiting and self._num_under_way < size:
            first = self._waiting.popleft()
            if not first.is_released:
                first.is_under_way = True
                self._num_under_way += 1
                entered.append(first)
        return entered

    def tick(self) -> int:
        """Return the next place in the order of starts and ends of sends."""
        return next(self._tick)

    def expect(self, credit: SlotCredit) -> None:
        """Note in the credit file that response `number` is about to be sent."""
        self._file.expect(credit.slot, credit.number)

    def watch(self, credit: SlotCredit) -> None:
        """Wait for the acknowledgement of the response that was just sent."""
        with self._lock:
            self._watched[credit.slot] = credit
        if not self._wake.is_set():
            self._wake.set()

    def settle(self, call: Call, then: Callable[[], None]) -> None:
        """Run `then` when postprocessing has answered all that a call sent, after 1 s at most.

        The caller must not send more for this call.
        """
        item = _Settling(call, then, time.monotonic_ns() + _MAX_SETTLE_NS)
        with self._lock:
            self._settling.append(item)
        self._wake.set()

    def close(self) -> None:
        """End the thread when all calls have settled."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        stay_together()
        last_ns = 0
        while self._settling or not self._is_closing:
            if not self._watched and not self._settling:
                self._wake.wait()
                self._alive_ns = last_ns = time.monotonic_ns()
            self._wake.clear()
            try:
                self._poll()
            except Exception:
                _log.exception("flow control failed")
            time.sleep(_POLL_S)
            now_ns = time.monotonic_ns()
            if now_ns - last_ns > _MAX_PAUSE_NS:
                self._alive_ns = now_ns
            last_ns = now_ns

    def _poll(self) -> None:
        with self._lock:
            watched = list(self._watched.values())
        spent = []
        for credit in watched:
            is_back = self._file.is_acknowledged(credit.slot, credit.number)
            # A cancel is written before the acknowledgement, so it is read after that.
            if self._file.is_cancelled(credit.slot, credit.number):
                self._end_call(credit, None)
            elif not is_back:
                spent.append(credit)
            if is_back:
                taker = self._file.taken_by(credit.slot)
                self._newest[taker] = max(self._newest.get(taker, 0), credit.send_started)
                self._moved_ns = time.monotonic_ns()
                self._give_back(credit)
        takers = self._file.takers() if spent else []
        for credit in spent:
            if self._is_dropped(credit, takers):
                self._end_call(credit, ContractError(_LOST, Code.UNAVAILABLE))
        if self._waiting:
            self._probe()
        self._settle_all()

    def _end_call(self, credit: SlotCredit, error: ContractError | None) -> None:
        """Cancel a call whose client has left; with an error if that is not certain."""
        self.num_cancelled += 1
        call = credit.stream.call
        assert call is not None, "its responses are sent"
        self._cancel(call, error)

    def _probe(self) -> None:
        """Send one more response if nothing moves: only a later one can prove a loss."""
        now_ns = time.monotonic_ns()
        if now_ns - self._moved_ns > _PROBE_NS:
            self._moved_ns = now_ns
            with self._lock:
                entered = self._let_in(self._num_under_way + 1)
            for first in entered:
                self._hand_over(first.stream)

    def _settle_all(self) -> None:
        if not self._settling:
            return
        now_ns = time.monotonic_ns()
        with self._lock:
            watched = {id(credit.stream.call) for credit in self._watched.values()}
            for item in self._settling:
                if id(item.call) in watched:
                    item.quiet_ns = None
                elif item.quiet_ns is None:
                    item.quiet_ns = now_ns
            ready = [item for item in self._settling if item.is_ready(now_ns)]
            self._settling = [item for item in self._settling if item not in ready]
        for item in ready:
            item.then()

    def _give_back(self, credit: SlotCredit) -> None:
        with self._lock:
            if self._watched.get(credit.slot) is not credit:
                return  # released meanwhile
            del self._watched[credit.slot]
        self.leave(credit)
        if not credit.stream.release():
            self._hand_over(credit.stream)

    def _is_dropped(self, credit: SlotCredit, takers: Sequence[int]) -> bool:
        """Return whether no process has or will get the response."""
        if not takers or not all(self._has_passed(credit, taker) for taker in takers):
            return False
        # Read again: it may have been acknowledged after the first look, before the others.
        return not self._file.is_acknowledged(credit.slot, credit.number)

    def _has_passed(self, credit: SlotCredit, taker: int) -> bool:
        """Return whether this process neither has nor will get the response."""
        if credit.send_ended < self._newest.get(taker, 0):
            return True
        now_ns = time.monotonic_ns()
        if now_ns - credit.send_ended_ns < _DROP_NS:
            return False
        idle_ns = self._file.idle_since_ns(taker, now_ns)
        if idle_ns is None:
            return False
        return now_ns - max(idle_ns, self._alive_ns, credit.send_ended_ns) >= _DROP_NS
