"""The HTTP protocol of the server: uvicorn's, with bounds on headers in bytes and in time."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from slipstream_gateway.errors import ApiError, openai_body
from slipstream_gateway.settings import MAX_HEADER_BYTES

_KEY = "slipstream.connection"
_MAX_PIPELINED = 16  # requests behind the one that runs, before no more is read
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class Protocol(HttpToolsProtocol):
    """A connection. Each request's scope leads back to it, see `connection_of`."""

    header_s: ClassVar[float] = 20.0  # time for the headers of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for headers."""
        super().connection_made(transport)
        self._num_header_bytes = 0
        self._running: RequestResponseCycle | None = None  # `cycle` is the last that came
        self.when_room: Callable[[], None] | None = None  # called once, when writes may go on
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(
            self.header_s, transport.close
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for headers, and the request that runs, though others came behind it."""
        self._stop_waiting()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse; headers that never end are refused."""
        if self.parser is None or self.transport.is_closing():
            return
        if self._deadline is None and self._is_between_requests:
            self._deadline = self.loop.call_later(self.header_s, self.transport.close)
        is_header = self._deadline is not None
        super().data_received(_without_upgrade(data) if is_header else data)
        if is_header and self._deadline is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse_headers()

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def on_message_begin(self) -> None:
        """Let the request's scope lead back here."""
        super().on_message_begin()
        self.scope["extensions"] = {_KEY: {"connection": self}}

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._stop_waiting()
        self._num_header_bytes = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        elif len(self.pipeline) <= _MAX_PIPELINED:
            self.flow.resume_reading()  # or its end would not be seen while one runs

    def on_response_complete(self) -> None:
        """Start the next request that came meanwhile."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def end_body_with_connection(self) -> None:
        """Have the response that starts now go out as it is, without chunks: for HTTP/1.0."""
        assert self._running is not None, "a response without a request"
        self._running.chunked_encoding = False

    def expect_bytes(self, count: int) -> None:
        """Let the last part of such a body have so many bytes: the server counts none of them."""
        assert self._running is not None, "a response without a request"
        self._running.expected_content_length = count

    def resume_writing(self) -> None:
        """Report that there is room for more, to the one that waits for it."""
        super().resume_writing()
        callback, self.when_room = self.when_room, None
        if callback is not None:
            callback()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_headers(self) -> None:
        message = f"the headers have more than {MAX_HEADER_BYTES} bytes"
        body = openai_body(ApiError(431, message))
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Return a request whose header `upgrade` has another name: there is nothing to upgrade to.

    Java's HttpClient offers h2c with each request, and the parser would leave the body unread.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body


def connection_of(scope: Mapping[str, Any]) -> Protocol:
    """Return the connection that a request came over."""
    connection: Protocol = scope["extensions"][_KEY]["connection"]
    return connection
