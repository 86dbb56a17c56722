"""The HTTP response of one request: headers and bytes, written without waiting."""

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from slipstream_gateway.errors import ApiError
from slipstream_gateway.protocol import Protocol, connection_of

Header = tuple[bytes, bytes]
Send = Any  # ASGI's

STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
JSON: Header = (b"content-type", b"application/json")


class Reply:
    """A response, by ASGI's `send` of a server that never waits unless its buffer is full.

    A write while `is_paused` is an error: the caller keeps what it has until there is room.
    """

    def __init__(self, scope: Mapping[str, Any], send: Send, headers: Iterable[Header]) -> None:
        """Take a request's scope; `headers` are part of every response to it."""
        self._connection: Protocol = connection_of(scope)
        self._send = send
        self._headers = list(headers)
        self._start_s = time.perf_counter()
        self._transport = self._connection.transport
        self._is_stream = False
        self._has_chunks = scope["http_version"] != "1.0"  # which ends a body with the connection
        self.is_started = False
        self.is_ended = False
        self.status = 0

    @property
    def is_paused(self) -> bool:
        """Whether the client reads slower than the answer comes."""
        return self._connection.flow.write_paused

    def when_room(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, once, when the client has read enough."""
        self._connection.when_room = callback

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the response, which has not started."""
        self._headers.append((name, value))

    def start(self, status: int = 200, headers: Iterable[Header] = STREAM_HEADERS) -> None:
        """Send status and headers."""
        assert not self.is_started
        self.is_started, self.status = True, status
        self._is_stream = headers is STREAM_HEADERS
        if self._is_stream and not self._has_chunks:
            self._connection.end_body_with_connection()
        message = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, *self._headers],
        }
        _push(self._send(message))

    def write(self, data: bytes, is_last: bool = False) -> None:
        """Send a part of the body; of a stream, as one chunk."""
        self.is_ended = is_last
        if self._is_stream and not is_last:  # as the server would, at a third of its cost
            if not self._transport.is_closing():
                chunk = b"%x\r\n%b\r\n" % (len(data), data) if self._has_chunks else data
                self._transport.write(chunk)
            return
        if self._is_stream and not self._has_chunks:
            self._connection.expect_bytes(len(data))
        _push(self._send({"type": "http.response.body", "body": data, "more_body": not is_last}))

    def respond(self, status: int, body: bytes, headers: Iterable[Header] = (JSON,)) -> None:
        """Send a whole response."""
        took_ms = (time.perf_counter() - self._start_s) * 1e3
        size = b"%d" % len(body)
        own = ((b"content-length", size), (b"openai-processing-ms", b"%d" % took_ms))
        self.start(status, (*headers, *own))
        self.write(body, is_last=True)

    def abort(self) -> None:
        """Close the connection at once; what was not sent is lost."""
        self._connection.transport.abort()

    def refuse(self, error: ApiError, body: bytes) -> None:
        """Send an error, and when to try again if that is known."""
        headers: list[Header] = [JSON]
        if error.retry_after_ms is not None:
            headers.append((b"retry-after-ms", b"%d" % error.retry_after_ms))
            headers.append((b"retry-after", b"%d" % max(1, -(-error.retry_after_ms // 1000))))
        self.respond(error.status, body, headers)


def _push(sending: Coroutine[Any, Any, None]) -> None:
    """Run a `send` that does not wait."""
    try:
        sending.send(None)
    except StopIteration:
        return
    sending.close()
    raise RuntimeError("written to a connection whose buffer is full")
