"""Watch all calls in turn for cancels and deadlines, in one thread.

The thread also ends calls that were cancelled, some time later.

The engine enforces deadlines itself, before every step. One that hangs does not: then the call is
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
_BURST = 16  # calls checked in a row
_PAUSE_S = _BURST / 2560  # between two bursts
_GRACE_NS = 1_000_000_000  # after a deadline, in which the engine ends it unless a step hangs


class Watch:
    """The thread that checks calls for cancels.

    A check is a round trip to the server, some 30 us of either side. Each call is checked about 20
    times a second, and all together 2,560 times at most: each of 256 calls every 100 ms, of 1,024
    every 400 ms. Calls of an ensemble are never checked: the server reports nothing to a step that
    has started.
    """

    def __init__(self, calls: Calls, is_stopping: Callable[[], bool]) -> None:
        """Start the thread; `is_stopping` returns whether the server, and so every call, ends."""
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
            start = time.monotonic()
            try:
                self._calls.end_cancelled(start)
                self._round()
            except Exception:
                _log.exception("watching for cancels failed")
            self._closed.wait(max(0.005, start + _ROUND_S - time.monotonic()))

    def _round(self) -> None:
        calls, watched = self._calls.snapshot(), []
        if calls and self._must_stop():
            return
        overdue_ns = time.monotonic_ns() - _GRACE_NS
        for call in calls:
            if 0 < call.deadline_ns < overdue_ns and not all(s.is_complete for s in call.streams):
                self._expire(call)
            elif not call.is_step:
                watched.append(call)
        for start in range(0, len(watched), _BURST):
            if start and (self._closed.wait(_PAUSE_S) or self._must_stop()):
                return
            for call in watched[start : start + _BURST]:
                self._calls.end_if_cancelled(call)

    def _must_stop(self) -> bool:
        """Return whether the server is stopping; all calls have then been ended with an error."""
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
