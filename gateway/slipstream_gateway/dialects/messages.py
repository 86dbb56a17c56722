"""Anthropic's `/v1/messages` and its `count_tokens`: a body becomes that of a chat completion."""

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream_gateway.dialects.events import encode, renamed
from slipstream_gateway.dialects.messages_fields import COUNTED, NAMES, TABLE, ToolChoice
from slipstream_gateway.dialects.messages_input import read_messages, unread
from slipstream_gateway.dialects.messages_writer import MessagesWriter, error_shape
from slipstream_gateway.errors import ApiError
from slipstream_gateway.fields import Table, convert

_OWN = ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
_RENAMED = {"max_tokens": "max_completion_tokens", "stop_sequences": "stop"}


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class Messages:
    """The dialect of `/v1/messages`."""

    table: Table = TABLE

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the chat completion that means the same. Raises ApiError 400."""
        self.table.check(body)
        chat: dict[str, Any] = {}
        silent = (*_OWN, "output_format", *self.table.ignored(body), "mcp_servers")
        for name, value in body.items():
            if value is not None and name not in silent:
                chat[_RENAMED.get(name, name)] = value
        chat["messages"] = read_messages(body)
        config = body.get("output_config") or {}
        if config.get("effort") is not None:
            chat["reasoning_effort"] = config["effort"]
        if (form := config.get("format") or body.get("output_format")) is not None:
            schema = {"name": "output", "schema": form["schema"], "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat | _thinking(body) | _tools(body)

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return what of a valid body has no effect."""
        names = self.table.ignored(body) + unread(body)
        for number, tool in enumerate(body.get("tools") or ()):
            if not _is_custom(tool):
                names.append(f"tools[{number}].type={str(tool.get('type'))[:40]}")
            names += [
                f"tools[{number}].{name}"
                for name in ("defer_loading", "input_examples", "allowed_callers")
                if tool.get(name)
            ]
        return names

    def writer(self, body: Mapping[str, Any], model: str) -> MessagesWriter:
        """Return a writer for the answer to a valid body."""
        return MessagesWriter(body, model)

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response, in Anthropic's shape."""
        return encode(error_shape(renamed(error, NAMES)))


class CountTokens(Messages):
    """The dialect of `/v1/messages/count_tokens`: a prompt is made and counted, not answered."""

    table = COUNTED

    def counted(self, prompt_tokens: int) -> bytes:
        """Return the body of the response."""
        return encode({"input_tokens": prompt_tokens})


def _is_custom(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables, and the budget of reasoning."""
    thinking = body.get("thinking") or {"type": "disabled"}
    variables = {"enable_thinking": thinking["type"] != "disabled"}
    variables |= body.get("chat_template_kwargs") or {}
    chat: dict[str, Any] = {"chat_template_kwargs": variables}
    if thinking.get("budget_tokens") is not None:
        if thinking["type"] != "enabled":
            raise ApiError(
                400,
                f"`thinking.budget_tokens` needs `thinking.type` enabled; got {thinking['type']}",
                "thinking.budget_tokens",
            )
        chat["thinking_token_budget"] = thinking["budget_tokens"]
    return chat


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls` of the chat completion."""
    tools: list[dict[str, Any]] = []
    for number, each in enumerate(body.get("tools") or ()):
        if _is_custom(each):
            tool: _Tool = convert(f"tools[{number}]", each, _Tool)
            function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
            if tool.description is not None:
                function["description"] = tool.description
            if tool.strict is not None:
                function["strict"] = tool.strict
            tools.append({"type": "function", "function": function})
    choice: ToolChoice = convert(
        "tool_choice", body.get("tool_choice") or {"type": "auto"}, ToolChoice
    )
    names = [tool["function"]["name"] for tool in tools]
    if choice.type == "tool" and choice.name not in names:
        message = f"`tool_choice.name`: `tools` has no {choice.name!r}"
        raise ApiError(400, message, "tool_choice.name")
    if choice.type != "tool" and choice.name is not None:
        raise ApiError(400, "`tool_choice.name` needs `tool_choice.type` tool", "tool_choice.name")
    if not tools:
        if choice.type == "any":
            raise ApiError(400, "`tool_choice`: any needs a tool in `tools`", "tool_choice")
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    words = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    chat: dict[str, Any] = {"tools": tools, "tool_choice": words[choice.type]}
    if choice.disable_parallel_tool_use is not None:
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat
