"""Ctrl-C while gRPC works in the main thread.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, those of gRPC
included. Where gRPC has just taken a lock that nothing releases then, each later call on its
channel waits forever: of short streams interrupted at random moments, one in ten left it so.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible(cancel: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Have Ctrl-C leave a block of the main thread at its end: a press calls `cancel`, which is to
    end the block soon, and the end of the block raises KeyboardInterrupt.

    Does nothing in other threads, or where the program handles SIGINT itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        cancel()

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_pressed:
            raise KeyboardInterrupt from None
