"""Read the input of `/v1/responses`: items become messages of a chat."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from slipstream_gateway.dialects.turns import Message, Turns
from slipstream_gateway.errors import ApiError
from slipstream_gateway.fields import convert, shown

_Status = Literal["in_progress", "completed", "incomplete"]
_ITEMS = "message, function_call, function_call_output and reasoning"
_PARTS = "input_text, output_text, refusal and text"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: _Status | None = None
    phase: str | None = None


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    call_id: str
    name: str
    arguments: str
    type: str
    id: str | None = None
    status: _Status | None = None
    caller: dict[str, Any] | None = None
    namespace: str | None = None


class _Output(msgspec.Struct, forbid_unknown_fields=True):
    call_id: str
    output: str | list[dict[str, Any]]
    type: str
    id: str | None = None
    status: _Status | None = None
    name: str | None = None
    caller: dict[str, Any] | None = None
    namespace: str | None = None


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    id: str | None = None
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    status: _Status | None = None


def read_input(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a checked body: its instructions and its input.

    Raises:
        ApiError: 400 with the place in `input`: an unknown item, part or field.
    """
    turns = Turns()
    if body.get("instructions"):
        turns.system(body["instructions"])
    given = body["input"]
    if isinstance(given, str):
        turns.user([given])
        return turns.messages
    for number, item in enumerate(given):
        _read_item(turns, f"input[{number}]", item)
    return turns.messages


def unread(body: Mapping[str, Any]) -> list[str]:
    """Return what of a valid input has no effect: reasoning that only its maker can read."""
    given = body.get("input")
    if not isinstance(given, list):
        return []
    return [
        f"input[{number}]"
        for number, item in enumerate(given)
        if item.get("type") == "reasoning" and not item.get("content") and not item.get("summary")
    ]


def _read_item(turns: Turns, where: str, item: Any) -> None:
    kind = convert(where, item, dict[str, Any]).get("type", "message")
    match kind:
        case "message":
            message = convert(where, item, _Message)
            texts = _texts(f"{where}.content", message.content)
            if message.role == "user":
                turns.user(texts)
            elif message.role == "assistant":
                turns.assistant(texts)
            else:
                turns.system("\n".join(texts))
        case "function_call":
            call = convert(where, item, _Call)
            turns.call(call.call_id, call.name, call.arguments)
        case "function_call_output":
            output = convert(where, item, _Output)
            turns.tool(output.call_id, _texts(f"{where}.output", output.output))
        case "reasoning":
            reasoning = convert(where, item, _Reasoning)
            parts = reasoning.content or reasoning.summary
            texts = [_text(f"{where}.content[{n}]", part) for n, part in enumerate(parts)]
            if any(texts):
                turns.reasoning("".join(texts))
        case _:
            raise ApiError(
                400,
                f"`{where}.type`: {shown(kind)} is not supported; items are {_ITEMS}",
                f"{where}.type",
                "unsupported_value",
            )


def _texts(where: str, content: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(f"{where}[{number}]", part) for number, part in enumerate(content)] or [""]


def _text(where: str, part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind not in (
        "input_text",
        "output_text",
        "text",
        "refusal",
        "reasoning_text",
        "summary_text",
    ):
        raise ApiError(
            400,
            f"`{where}.type`: {shown(kind)} is not supported; models read text, so parts are "
            f"{_PARTS}",
            f"{where}.type",
            "unsupported_value",
        )
    key = "refusal" if kind == "refusal" else "text"
    text: str = convert(f"{where}.{key}", part.get(key), str)
    return text
