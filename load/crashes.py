"""tritonserver can end by itself, or hang, under cancels.

Two races in its gRPC front end: one crashes a 24.10 and is mended in 25.05; of the other all its
streams stand still (slipstream_compose.front_end).
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator

from slipstream_compose.front_end import FrontEnd
from slipstream_compose.triton import TritonServer

SAYS_S = 5.0  # a server that crashes writes its stack first
_HUNG = "all gRPC streams stood still"
_CRASH = re.compile(rf"Signal \((6|7|11)\) received|{_HUNG}")
_LOOK_S = 0.2


def crash_of(server: TritonServer) -> str:
    """What its log tells of a crash by itself; nothing where there was none."""
    found = _CRASH.search(server.log.read_text(errors="replace"))
    return found.group() if found else ""


@contextlib.contextmanager
def crashed_is_ended(server: TritonServer) -> Iterator[None]:
    """One that hangs, or has crashed and does not end, is ended in the meantime; its log says so.

    Where it was the heap that broke, it can wait for ever for a lock to write its stack.
    """
    is_over = threading.Event()
    front_end = FrontEnd(server.endpoints)

    def watch() -> None:
        while not is_over.wait(_LOOK_S):
            if server.exit_code is not None:
                return
            if front_end.is_hung(server.pid):
                with server.log.open("a") as log:
                    log.write(f"{_HUNG}\n")
                os.kill(server.pid, signal.SIGKILL)
                return
            if crash_of(server) and not is_over.wait(SAYS_S):
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
        front_end.close()
