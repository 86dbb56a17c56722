"""tritonserver can end by itself, or hang, under cancels.

Two races in its gRPC front end: one crashes a 24.10 and is mended in 25.05; of the other all its
streams stand still (slipstream_serve.front_end, slipstream_serve.hangs).
"""

import itertools
import os
import re
import signal
import threading
from typing import Self

from slipstream_serve.hangs import ServerWatch
from slipstream_serve.triton import TritonServer

SAYS_S = 5.0  # a server that crashes writes its stack first
_CRASH = re.compile(r"Signal \((6|7|11)\) received")
_LOOK_S = 0.2
_LOOKS_A_READ = 5  # of the log


class Watch:
    """Watches one server. A server that hangs, or has crashed and does not end, is ended.

    Where it was the heap that broke, it can wait for ever for a lock to write its stack.
    """

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._hang = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crashes", daemon=True)

    @property
    def crash(self) -> str:
        """How it crashed or hung by itself; nothing where it did not."""
        if self._hang:
            return self._hang
        found = _CRASH.search(self._server.log.read_text(errors="replace"))
        return found.group() if found else ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        watch = ServerWatch(self._server.endpoints)
        for look in itertools.count():
            if self._is_over.wait(_LOOK_S) or self._server.exit_code is not None:
                break
            self._hang = watch.hang(self._server.pid)
            if self._hang or (look % _LOOKS_A_READ == 0 and self.crash):
                is_over = self._is_over.wait(0.0 if self._hang else SAYS_S)
                if not is_over and self._server.exit_code is None:
                    os.kill(self._server.pid, signal.SIGKILL)
                break
        watch.close()
