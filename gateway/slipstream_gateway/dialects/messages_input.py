"""Read system, messages and tools of `/v1/messages`: blocks become messages of a chat."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from slipstream_gateway.dialects.events import encode
from slipstream_gateway.dialects.messages_fields import Message
from slipstream_gateway.dialects.turns import Message as ChatMessage
from slipstream_gateway.dialects.turns import Turns
from slipstream_gateway.errors import ApiError
from slipstream_gateway.fields import convert, shown

# Claude Code puts a line into its system text that differs in each request, and so would keep all
# that follows out of the prefix cache. It is for a bill.
BILLING = "x-anthropic-billing-header:"
ERROR = "Error: "
_BLOCKS = "text, tool_use, tool_result, thinking and redacted_thinking"


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[dict[str, Any]] | None = None


class _ToolUse(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class _ToolResult(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None
    toolset_name: str | None = None


class _Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    thinking: str
    signature: str | None = None
    cache_control: dict[str, Any] | None = None


def read_messages(body: Mapping[str, Any]) -> list[ChatMessage]:
    """Return the messages of a checked body: its system text and its messages.

    Raises:
        ApiError: 400 with the place in `system` or `messages`: an unknown block or field.
    """
    turns = Turns()
    texts = [text for text in _system(body) if not text.startswith(BILLING)]
    if texts:
        turns.system("\n".join(texts))
    if not body["messages"]:
        raise ApiError(400, "`messages` is empty; it needs at least 1", "messages")
    for number, each in enumerate(body["messages"]):
        where = f"messages[{number}]"
        message: Message = convert(where, each, Message)
        blocks = _blocks(message.content)
        places = [(f"{where}.content[{n}]", block) for n, block in enumerate(blocks)]
        if message.role == "system":
            turns.system("\n".join(_text(place, block) for place, block in places))
        elif message.role == "user":
            _read_user(turns, places)
        else:
            _read_assistant(turns, places)
    return turns.messages


def unread(body: Mapping[str, Any]) -> list[str]:
    """Return the blocks of a valid body that have no effect."""
    names = [
        f"system[{number}] ({BILLING[:-1]})"
        for number, text in enumerate(_system(body))
        if text.startswith(BILLING)
    ]
    for number, message in enumerate(body["messages"]):
        for place, block in enumerate(_blocks(message["content"])):
            if block.get("type") == "redacted_thinking":
                names.append(f"messages[{number}].content[{place}]")
    return names


def _system(body: Mapping[str, Any]) -> list[str]:
    blocks = _blocks(body.get("system") or [])
    return [_text(f"system[{number}]", block) for number, block in enumerate(blocks)]


def _read_user(turns: Turns, places: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Add results of tools, and the texts between them, in their order."""
    texts: list[str] = []
    for where, block in places:
        if block.get("type") != "tool_result":
            texts.append(_text(where, block))
            continue
        if texts:
            turns.user(texts)
            texts = []
        result: _ToolResult = convert(where, block, _ToolResult)
        content = [
            _text(f"{where}.content[{number}]", each)
            for number, each in enumerate(_blocks(result.content or ""))
        ]
        if result.is_error:
            content = [ERROR + content[0], *content[1:]] if content else [ERROR]
        turns.tool(result.tool_use_id, content or [""])
    if texts:
        turns.user(texts)


def _read_assistant(turns: Turns, places: Iterable[tuple[str, dict[str, Any]]]) -> None:
    texts: list[str] = []

    def flush() -> None:
        if texts:
            turns.assistant(list(texts))
            texts.clear()

    for where, block in places:
        match block.get("type"):
            case "tool_use":
                flush()
                use: _ToolUse = convert(where, block, _ToolUse)
                turns.call(use.id, use.name, encode(use.input).decode())
            case "thinking":
                flush()
                thinking: _Thinking = convert(where, block, _Thinking)
                if thinking.thinking:
                    turns.reasoning(thinking.thinking)
            case "redacted_thinking":
                pass  # only its maker can read it; named in the header
            case _:
                texts.append(_text(where, block))
    flush()


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _text(where: str, block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind != "text":
        raise ApiError(
            400,
            f"`{where}.type`: {shown(kind)} is not supported here; models read text, so blocks "
            f"are {_BLOCKS}",
            f"{where}.type",
            "unsupported_value",
        )
    text: _Text = convert(where, block, _Text)
    return text.text
