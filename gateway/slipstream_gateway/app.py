"""The ASGI application: keys, origins and ids of requests, then the endpoint."""

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from slipstream_gateway.body import Receive
from slipstream_gateway.dialects.chat import Chat
from slipstream_gateway.dialects.completions import Completions
from slipstream_gateway.dialects.dialect import Dialect
from slipstream_gateway.dialects.messages import CountTokens, Messages
from slipstream_gateway.dialects.openai_fields import CHAT, COMPLETION
from slipstream_gateway.dialects.responses import Responses
from slipstream_gateway.errors import ApiError, openai_body
from slipstream_gateway.generate import Generator
from slipstream_gateway.metrics import Metrics
from slipstream_gateway.page import files
from slipstream_gateway.reply import Header, Reply, Send
from slipstream_gateway.settings import Settings

_log = logging.getLogger(__name__)

GENERATE: Mapping[str, tuple[Dialect, str]] = {
    "/v1/chat/completions": (Chat(), CHAT),
    "/v1/completions": (Completions(), COMPLETION),
    "/v1/responses": (Responses(), CHAT),
    "/v1/messages": (Messages(), CHAT),
    "/v1/messages/count_tokens": (CountTokens(), CHAT),
}
"""Path -> its dialect, and whether that is one over chats or completions."""

_OPEN = frozenset({"/health", "/ready", "/ping", "/v1/health"})  # without a key
_PAGE = frozenset(files())  # it asks for the key
_ID = re.compile(rb"[\x21-\x7e]{1,256}")
_ALLOWED = b"authorization, content-type, x-api-key, x-request-id, anthropic-version"
_EXPOSED = b"x-request-id, x-slipstream-ignored, retry-after, retry-after-ms"


class App:
    """The application. Its hot path is bare ASGI; all else goes to `rest`."""

    def __init__(
        self,
        generator: Generator,
        rest: Any,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """`rest`: an ASGI application for all that does not generate."""
        self._generator = generator
        self._rest = rest
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        common = self._common_headers(headers)
        reply = Reply(scope, send, common)
        path, method = scope["path"], scope["method"]
        found = GENERATE.get(path)
        if method == "OPTIONS" and b"origin" in headers:
            reply.respond(204, b"", self._preflight(headers))
        elif not (path in _OPEN or path in _PAGE or self._settings.keys.opens(headers)):
            self._refuse(reply, found, self._unauthorized(headers))
        elif found is None:
            await self._rest(scope, receive, _with_headers(send, common))
            return
        elif method != "POST":
            reply.add_header(b"allow", b"POST")
            self._refuse(reply, found, ApiError(405, f"{method} is not served here, POST is"))
        else:
            await self._generator.serve(*found, reply, receive, headers)
        self._metrics.count_response(path if found else "other", reply.status)

    def _refuse(self, reply: Reply, found: tuple[Dialect, str] | None, error: ApiError) -> None:
        reply.refuse(error, found[0].error(error) if found else openai_body(error))

    def _unauthorized(self, headers: Mapping[bytes, bytes]) -> ApiError:
        given = headers.keys() & {b"authorization", b"x-api-key"}
        said = "the API key is not one of this server's" if given else "no API key was given"
        message = f"{said}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        return ApiError(401, message, code="invalid_api_key")

    def _common_headers(self, headers: Mapping[bytes, bytes]) -> list[Header]:
        given = headers.get(b"x-request-id", b"")
        own = given if _ID.fullmatch(given) else secrets.token_hex(16).encode()
        common = [(b"x-request-id", own)]
        allowed = self._allowed_origin(headers)
        if allowed:
            common += [
                (b"access-control-allow-origin", allowed),
                (b"access-control-expose-headers", _EXPOSED),
            ]
        if self._settings.allowed_origins:
            common.append((b"vary", b"origin"))
        return common

    def _allowed_origin(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the origin that may read the answer; empty: none."""
        origin, allowed = headers.get(b"origin", b""), self._settings.allowed_origins
        if origin and "*" in allowed:
            return b"*"
        return origin if origin.decode("latin-1") in allowed else b""

    def _preflight(self, headers: Mapping[bytes, bytes]) -> tuple[Header, ...]:
        if not self._allowed_origin(headers):
            return ()
        wanted = headers.get(b"access-control-request-headers")  # SDKs have dozens of their own
        return (
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", wanted or _ALLOWED),
            (b"access-control-max-age", b"600"),
        )


def _with_headers(send: Send, headers: list[Header]) -> Send:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sending
