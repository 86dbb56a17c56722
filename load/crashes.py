"""tritonserver 24.10 can crash by itself under cancels.

A race in its gRPC front end, mended in 25.05.
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator

from slipstream_compose.triton import TritonServer

SAYS_S = 5.0  # a server that crashes writes its stack first
_CRASH = re.compile(r"Signal \((6|7|11)\) received")


def has_crashed(server: TritonServer) -> bool:
    """Whether its log tells of a crash by itself."""
    return _CRASH.search(server.log.read_text(errors="replace")) is not None


@contextlib.contextmanager
def crashed_is_ended(server: TritonServer) -> Iterator[None]:
    """One that has crashed is ended in the meantime if it does not end.

    Where it was the heap that broke, it can wait for ever for a lock to write its stack.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            if has_crashed(server) and not is_over.wait(SAYS_S):
                if server.exit_code is None:
                    os.kill(server.pid, signal.SIGKILL)
                return

    thread = threading.Thread(target=watch, name="crashes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
