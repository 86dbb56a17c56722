"""Ctrl-C while gRPC works in the main thread.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, those of gRPC
included. Where gRPC has just taken a lock that nothing releases then, each later call on its
channel waits forever: of short streams interrupted at random moments, one in ten left it so.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interruptible:
    """A block of the main thread that Ctrl-C leaves at its end: a press calls `cancel`, which is
    to end the block soon, and the end of the block raises KeyboardInterrupt.

    Does nothing in other threads, or where the program handles SIGINT itself.
    """

    def __init__(self, cancel: Callable[[], object] = lambda: None) -> None:
        self._cancel = cancel
        self._is_armed = False
        self._is_pressed = False

    def __enter__(self) -> None:
        self._is_armed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._is_armed:
            signal.signal(signal.SIGINT, self._press)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_armed:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_pressed:
            raise KeyboardInterrupt from None

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._is_pressed = True
        self._cancel()
