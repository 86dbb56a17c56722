"""Detect that the server is shutting down, of which Triton notifies no model.

A server that got SIGTERM lets streams run on without a limit, and refuses the next step of every
ensemble. `slipstream serve` creates the file `stopping` before it ends its server, and the bridges
then end all streams with an error. This module creates it where a tritonserver runs alone.
"""

import contextlib
import socket
import threading
from pathlib import Path

from slipstream_runtime.directory import Runtime

_PAUSE_S = 0.05
_LOOK_S = 0.05  # a server that turns a connection away does so in this time
_PATIENCE_S = 5.0
_NUM_REFUSALS = 2  # in a row
_HTTP_PORT = 8000  # Triton's own default


def http_address(command: list[str]) -> tuple[str, int] | None:
    """Return where a tritonserver with that command line listens for HTTP; None if it does not."""
    options = dict(_options(command))
    if options.get("allow-http", "true").lower() in ("false", "0"):
        return None
    host = options.get("http-address", "127.0.0.1")
    port = options.get("http-port", str(_HTTP_PORT))
    return ("127.0.0.1" if host == "0.0.0.0" else host, int(port)) if port.isdigit() else None


def _options(command: list[str]) -> list[tuple[str, str]]:
    """Split `--name=value` and `--name value`; a flag gets the next word as a meaningless value."""
    pairs = []
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs.append((name, value if equals else following))
    return pairs


class EndWatch:
    """A thread that checks ten times a second whether the server still accepts connections.

    A server that shuts down stops that first: while it has streams over HTTP it turns others away,
    and then it stops listening.
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
        refusals_left = 0  # refusals count only after an accepted connection
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
    """Return whether the server is not listening, or turns connections away at once.

    A server that is slow, or out of file descriptors, does not count as refusing.
    """
    try:
        with socket.create_connection(address, _PATIENCE_S) as link:
            link.settimeout(_LOOK_S)
            return link.recv(1) == b""
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
