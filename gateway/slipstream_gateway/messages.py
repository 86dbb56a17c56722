"""Messages of a chat, as templates take them."""

from collections.abc import Mapping
from typing import Any

import msgspec
from slipstream_contract.errors import ContractError, clip

MAX_MESSAGES = 16_384
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(value: object, knows_developer: bool) -> list[dict[str, Any]]:
    """Return the messages with plain texts, and the arguments of calls as objects.

    A template that does not know the role `developer` gets `system`. Raises ContractError.
    """
    if not isinstance(value, list):
        raise ContractError(f"messages is {clip(value)}, not a list of messages")
    if not value:
        raise ContractError("messages is empty")
    if len(value) > MAX_MESSAGES:
        raise ContractError(f"messages has {len(value)} entries, at most {MAX_MESSAGES} are served")
    return [_message(f"messages[{i}]", each, knows_developer) for i, each in enumerate(value)]


def _message(field: str, given: object, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ContractError(f"{field} is {clip(given)}, not an object")
    role = given.get("role")
    if role not in _ROLES:
        raise ContractError(f"{field}.role is {clip(role)}, not one of {', '.join(_ROLES)}")
    message = dict(given)
    if role == "developer" and not knows_developer:
        message["role"] = "system"
    calls = given.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _calls(f"{field}.tool_calls", calls)
        if not calls:
            del message["tool_calls"]
    content = _content(f"{field}.content", given.get("content"))
    if content is None:
        if role != "assistant":
            raise ContractError(f"{field}.content is missing")
        content = ""
    message["content"] = content
    return message


def _content(field: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ContractError(f"{field} is {clip(value)}, neither a text nor a list of parts")
    return "\n".join(_part(f"{field}[{i}]", part) for i, part in enumerate(value))


def _part(field: str, part: object) -> str:
    if not isinstance(part, dict):
        raise ContractError(f"{field} is {clip(part)}, not an object")
    kind = part.get("type")
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise ContractError(f"{field}.type is {clip(kind)}, only text is served")
    text = part.get(key)
    if not isinstance(text, str):
        raise ContractError(f"{field}.{key} is {clip(text)}, not a text")
    return text


def _calls(field: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ContractError(f"{field} is {clip(value)}, not a list of calls")
    return [_call(f"{field}[{i}]", call) for i, call in enumerate(value)]


def _call(field: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ContractError(f"{field} is {clip(call)}, not a call of a function")
    function: dict[str, Any] = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise ContractError(f"{field}.function.name is {clip(function.get('name'))}, not a text")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _parsed(arguments)
    elif arguments is None:
        function["arguments"] = {}
    elif not isinstance(arguments, dict):
        raise ContractError(f"{field}.function.arguments is {clip(arguments)}, not a JSON text")
    return {**call, "function": function}


def _parsed(text: str) -> object:
    """Return the object that a JSON text holds; the text itself if it holds none."""
    try:
        value: object = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
    return value if isinstance(value, Mapping) else text
