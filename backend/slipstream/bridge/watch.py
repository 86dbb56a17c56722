"""One thread that looks at every call in turn: has its client cancelled, is its time over?

It also ends those that were cancelled, some time later.

The engine keeps deadlines itself, before every step. One that hangs keeps none: then the call is
ended here, a while after its deadline.
"""

import logging
import threading
import time
from collections.abc import Callable

from slipstream_contract.errors import Code, ContractError

from slipstream.bridge.cores import stay_together
from slipstream.bridge.streams import Call, Calls
from slipstream.wire import CancelCause

_log = logging.getLogger(__name__)

_ROUND_S = 0.05
_BURST = 16  # asked in a row
_PAUSE_S = _BURST / 2560  # between two bursts
_GRACE_NS = 1_000_000_000  # after a deadline: a step that ends in this time keeps it better


class Watch:
    """Asking is a round trip to the server, some 30 us of either side.

    Each call is asked about 20 times a second, and all of them together 2,560 times at most: of 256
    calls each is asked every 100 ms, of 1,024 every 400 ms. Steps of an ensemble are never asked:
    the server tells them nothing once they have begun.
    """

    def __init__(self, calls: Calls, is_stopping: Callable[[], bool]) -> None:
        """`is_stopping` tells that the server ends: then so do all calls."""
        self._calls = calls
        self._is_stopping = is_stopping
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        stay_together()
        while not self._closed.is_set():
            begin = time.monotonic()
            try:
                self._calls.end_left(begin)
                self._round()
            except Exception:
                _log.exception("watching for cancels failed")
            self._closed.wait(max(0.005, begin + _ROUND_S - time.monotonic()))

    def _round(self) -> None:
        calls, asked = self._calls.snapshot(), []
        if calls and self._must_stop():
            return
        overdue_ns = time.monotonic_ns() - _GRACE_NS
        for call in calls:
            if 0 < call.deadline_ns < overdue_ns and not all(s.is_told for s in call.streams):
                self._expire(call)
            elif not call.is_step:
                asked.append(call)
        for begin in range(0, len(asked), _BURST):
            if begin and (self._closed.wait(_PAUSE_S) or self._must_stop()):
                return
            for call in asked[begin : begin + _BURST]:
                self._calls.ask(call)

    def _must_stop(self) -> bool:
        """Whether the server ends; all calls then have ended with an error."""
        if not self._is_stopping():
            return False
        self._calls.fail_all(ContractError("the server is stopping", Code.UNAVAILABLE))
        return True

    def _expire(self, call: Call) -> None:
        passed_ns = time.monotonic_ns() - call.deadline_ns + call.timeout_ns
        message = (
            f"{passed_ns / 1e6:.0f} ms have passed, of {call.timeout_ns / 1e6:.12g} asked for by "
            "timeout_ms or timeout; the engine has not ended it"
        )
        error = ContractError(message, Code.DEADLINE_EXCEEDED)
        self._calls.fail(call, error, CancelCause.DEADLINE)
