"""One thread that asks for every call in turn whether its client has cancelled."""

import logging
import threading
import time
from collections.abc import Callable

from slipstream_contract.errors import Code, ContractError

from slipstream.bridge.streams import Calls

_log = logging.getLogger(__name__)

_ROUND_S = 0.05


class Watch:
    """Asking is a round trip to the server: each call is asked about 20 times a second."""

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
        while not self._closed.is_set():
            begin = time.monotonic()
            try:
                self._round()
            except Exception:
                _log.exception("watching for cancels failed")
            self._closed.wait(max(0.005, begin + _ROUND_S - time.monotonic()))

    def _round(self) -> None:
        calls = self._calls.snapshot()
        if calls and self._is_stopping():
            self._calls.fail_all(ContractError("the server is stopping", Code.UNAVAILABLE))
            return
        for call in calls:
            with call.lock:
                is_gone = not call.is_over and call.reply.is_cancelled()
            if is_gone:
                self._calls.cancel(call)
