"""Turn the messages of a chat request into those that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_contract.errors import clip

from slipstream_gateway.errors import ApiError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # the older name
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content", "thinking", "refusal")
_NOT_SERVED = ("audio", "images", "videos")


class Arguments(dict[str, Any]):
    """Arguments of a call: an object for templates that want one, which adds up as its JSON text.

    Some templates write `arguments | tojson` or go through the items; others, older ones, add
    `arguments` to a text, as it is a text in a request.
    """

    def __init__(self, text: str, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text

    def __str__(self) -> str:
        return self._text


def prepare_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages whose content is text and whose calls have their arguments as objects.

    Fields that are not known here stay: a template may read them. Raises ApiError naming the
    message, the field and what is served.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", f"{clip(messages)}, not a list")
    if not messages:
        raise _wrong("messages", "empty")
    return [_prepared(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _prepared(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, f"{clip(message)}, not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"{clip(role)}, not one of {', '.join(_ROLES)}")
    for field in _TEXTS:
        if not isinstance(message.get(field), str | None):
            raise _wrong(f"{where}.{field}", f"{clip(message[field])}, not a text")
    for field in _NOT_SERVED:
        if message.get(field) not in (None, []):
            raise _wrong(f"{where}.{field}", "given, but only text is served")
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = _ROLES[role]
    if message.get("content") is None and role != "assistant":
        raise _wrong(f"{where}.content", "missing; only a message of role assistant may lack it")
    result["content"] = _content(message.get("content"), f"{where}.content")
    if refusal := result.pop("refusal", ""):
        result["content"] = result["content"] or refusal
    calls = message.get("tool_calls")
    if (old := result.pop("function_call", None)) is not None:
        if calls not in (None, []):
            raise _wrong(f"{where}.function_call", "given beside tool_calls, which mean the same")
        calls = [{"type": "function", "function": old}]
    if calls not in (None, []):
        result["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    else:
        result.pop("tool_calls", None)  # templates test whether there are any by its presence
    return result


def _content(content: object, where: str) -> str:
    """Return the text of a content; its parts become lines."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(where, f"{clip(content)}, neither a text nor a list of parts")
    texts = []
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise _wrong(here, f"{clip(part)}, not an object")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise _wrong(f"{here}.type", f"{clip(kind)}, but only text is served")
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise _wrong(f"{here}.{_TEXT_PARTS[kind]}", f"{clip(text)}, not a text")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise _wrong(where, f"{clip(calls)}, not a list")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _wrong(where, f"{clip(call)}, not an object")
    if call.get("type", "function") != "function":
        raise _wrong(f"{where}.type", f"{clip(call['type'])}, only function is served")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{where}.function", f"{clip(function)}, not an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.function.name", f"{clip(name)}, not a name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, where: str) -> str | Arguments:
    """Return arguments as an object; a text that is none stays as it is."""
    if isinstance(arguments, Mapping):
        return Arguments(json.dumps(arguments, ensure_ascii=False), arguments)
    if arguments is not None and not isinstance(arguments, str):
        raise _wrong(where, f"{clip(arguments)}, neither a text nor an object")
    text = arguments or "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return Arguments(text, value) if isinstance(value, dict) else text


def _wrong(field: str, problem: str) -> ApiError:
    return ApiError(400, f"{field} is {problem}", field)
