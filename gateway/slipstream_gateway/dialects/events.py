"""Write what the dialects share: server-sent events, and names of fields in errors."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream_gateway.answer import CallArguments, Delta, Reasoning, Text
from slipstream_gateway.errors import ApiError

_WORD = re.compile(r"\w+")

encode = msgspec.json.Encoder().encode


def event(name: str, payload: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with its type in both places where clients look."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **payload}))


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error about a chat completion in the words of a dialect.

    `names` maps fields of the chat completion to those of the dialect. An error that says no field
    is about the first word of its message, if that is one.
    """
    word = _WORD.match(error.message)
    param = error.param or (word[0] if word is not None else "")
    if param not in names:
        return error
    name = names[param]
    message = re.sub(rf"\b{re.escape(param)}\b", lambda _: name, error.message)
    return ApiError(error.status, message, name, error.code, error.retry_after_ms)


def joined(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """Return deltas of which neighbours of a kind are one, so that a write is few events.

    Empty texts are left out.
    """
    if len(deltas) == 1 and type(deltas[0]) is Text and deltas[0].text:  # nearly all of them
        return deltas
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match delta, last:
            case ((Text(text) | Reasoning(text)), _) if not text:
                continue
            case Text(text), Text(before):
                result[-1] = Text(before + text)
            case Reasoning(text), Reasoning(before):
                result[-1] = Reasoning(before + text)
            case CallArguments(index, text), CallArguments(_, before):
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(delta)
    return result
