"""Notices that the server was told to end, which Triton tells no model.

A server that got SIGTERM lets streams run on for as long as they like, and refuses the next step
of every ensemble. `slipstream serve` makes the file `stopping` before it ends its server, whereupon
the bridges end all streams with an error; this makes it where a tritonserver runs alone.
"""

import contextlib
import socket
import threading
from pathlib import Path

from slipstream_runtime.directory import Runtime

_PAUSE_S = 0.05
_LOOK_S = 0.05  # in which a server turns a connection away, if it does
_PATIENCE_S = 5.0
_NUM_REFUSALS = 2  # in a row
_HTTP_PORT = 8000  # Triton's own default


def http_address(command: list[str]) -> tuple[str, int] | None:
    """Where a tritonserver of that command line listens for HTTP; None where it does not."""
    options = dict(_options(command))
    if options.get("allow-http", "true").lower() in ("false", "0"):
        return None
    host = options.get("http-address", "127.0.0.1")
    port = options.get("http-port", str(_HTTP_PORT))
    return ("127.0.0.1" if host == "0.0.0.0" else host, int(port)) if port.isdigit() else None


def _options(command: list[str]) -> list[tuple[str, str]]:
    """`--name=value` and `--name value`; a flag's value is the word after it, and means nothing."""
    pairs = []
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs.append((name, value if equals else following))
    return pairs


class EndWatch:
    """One thread that looks ten times a second whether the server still takes connections.

    To stop that is the first thing that a server does that was told to end: while it has streams
    over HTTP it turns others away, and then it listens no more.
    """

    def __init__(self, runtime: Runtime, server_pid: int) -> None:
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        command = Path(f"/proc/{server_pid}/cmdline").read_bytes().decode(errors="replace")
        address = http_address(command.split("\0"))
        if address is not None:
            self._thread = threading.Thread(target=self._run, args=(runtime, address), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, runtime: Runtime, address: tuple[str, int]) -> None:
        refusals_left = 0  # none counts before it has taken one
        while not self._closed.wait(_PAUSE_S):
            if not _is_refused(address):
                refusals_left = _NUM_REFUSALS
            elif refusals_left == 1:
                with contextlib.suppress(OSError):
                    runtime.stopping.touch()
                return
            elif refusals_left:
                refusals_left -= 1


def _is_refused(address: tuple[str, int]) -> bool:
    """Whether nobody listens there, or turns us away: who is slow or out of files does not."""
    try:
        with socket.create_connection(address, _PATIENCE_S) as link:
            link.settimeout(_LOOK_S)
            return link.recv(1) == b""
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
