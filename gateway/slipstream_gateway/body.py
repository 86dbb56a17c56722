"""Read the body of a request: bounded in bytes, in time and in depth."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from slipstream_contract.errors import clip

from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.values import type_of
from slipstream_gateway.settings import MAX_DEPTH, Settings

Receive = Any  # ASGI's
_NAMED = 64  # characters of a field's name in an error
_SCALARS = frozenset((str, int, float, bool, type(None)))
# What may end a key: a quote with an even number of backslashes before it, and a colon.
_KEY_END = re.compile(rb'"(?:(?<!\\")|(?<=\\\\"))[ \t\r\n]*:')


class GoneError(Exception):
    """The client has disconnected; nobody reads an answer."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], settings: Settings) -> bytes:
    """Return the whole body. Raises ApiError for one that is too long or too late, GoneError."""
    most = settings.max_body_bytes
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > most:
        raise _too_long(most)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "content-encoding: only plain bodies are served")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise _too_long(most)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        message = f"the body did not come within {settings.body_s:g} s"
        raise ApiError(408, message) from None


async def wait_gone(receive: Receive) -> None:
    """Return when the client has disconnected, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is JSON of type {type_of(value)}, not an object")
    if _count_keys(value) != len(_KEY_END.findall(data)):
        _refuse_twins(data)
    return value


def _refuse_twins(data: bytes) -> None:
    """Raise ApiError where an object has a key twice: one of the values would be dropped.

    It takes more than twice the time of decoding. Ends of keys in the text, counted, are never
    fewer than its keys: if the value has as many keys, none was dropped.
    """
    json.loads(data, object_pairs_hook=_without_twins, parse_int=len, parse_float=len)


def _without_twins(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ApiError(400, f"{clip(name)} is given twice in the body", name[:_NAMED])
        names.add(name)


def _count_keys(value: object) -> int:
    """Return how many keys all objects of a value have. Raises ApiError for one too deep."""
    num_keys = 0
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                num_keys += len(each)
                if not _SCALARS.issuperset(map(type, each.values())):
                    inner.extend(each.values())
            elif isinstance(each, list) and not _SCALARS.issuperset(map(type, each)):
                inner.extend(each)
        if not inner:
            return num_keys
        level = inner
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested too deeply, at most {MAX_DEPTH} levels are served")


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="request_too_large")
