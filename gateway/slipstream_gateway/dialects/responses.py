"""OpenAI's `/v1/responses`, without state: a body becomes that of a chat completion."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from slipstream_gateway.dialects.events import encode, renamed
from slipstream_gateway.dialects.openai_fields import EXTRAS
from slipstream_gateway.dialects.responses_fields import LOG_PROBS, NAMES, TABLE
from slipstream_gateway.dialects.responses_input import read_input, unread
from slipstream_gateway.dialects.responses_writer import ResponsesWriter
from slipstream_gateway.errors import ApiError
from slipstream_gateway.fields import convert, shown

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "stop", *EXTRAS)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class Responses:
    """The dialect of `/v1/responses`."""

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the chat completion that means the same. Raises ApiError 400."""
        TABLE.check(body)
        chat = {name: body[name] for name in _SAME if body.get(name) is not None}
        chat["messages"] = read_input(body)
        if body.get("max_output_tokens") is not None:
            chat["max_completion_tokens"] = body["max_output_tokens"]
        if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
            chat["reasoning_effort"] = effort
        if (form := (body.get("text") or {}).get("format")) is not None:
            chat["response_format"] = _response_format(form)
        top = body.get("top_logprobs")
        if top or LOG_PROBS in (body.get("include") or ()):
            chat |= {"logprobs": True, "top_logprobs": top or 0}
        return chat | _tools(body)

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return what of a valid body has no effect."""
        names = TABLE.ignored(body) + unread(body)
        names += [f"include[{name}]" for name in body.get("include") or () if name != LOG_PROBS]
        for field, only in (("reasoning", "effort"), ("text", "format")):
            given = body.get(field) or {}
            names += [f"{field}.{name}" for name in given if name != only and given[name]]
        for number, tool in enumerate(body.get("tools") or ()):
            if tool.get("type") != "function":
                names.append(f"tools[{number}].type={str(tool.get('type'))[:40]}")
        return names

    def writer(self, body: Mapping[str, Any], model: str) -> ResponsesWriter:
        """Return a writer for the answer to a valid body."""
        return ResponsesWriter(body, functions(body), model)

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response, in OpenAI's shape."""
        error = renamed(error, NAMES)
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if error.status == 429 else _TYPES.get(error.status, kind)
        shape = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return encode({"error": shape})


def functions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a body that are functions, without what has no effect on them."""
    tools = []
    for number, tool in enumerate(body.get("tools") or ()):
        if tool.get("type") == "function":
            function: _Function = convert(f"tools[{number}]", tool, _Function)
            tools.append(
                {
                    "type": "function",
                    "name": function.name,
                    "description": function.description,
                    "parameters": function.parameters,
                    "strict": function.strict,
                }
            )
    return tools


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls` of the chat completion."""
    tools = functions(body)
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed: _Allowed = convert("tool_choice", choice, _Allowed)
        names = [each.get("name") for each in allowed.tools if each.get("type") == "function"]
        tools, choice = [tool for tool in tools if tool["name"] in names], allowed.mode
    needs_tools = choice not in ("none", "auto")
    if isinstance(choice, dict):
        name = choice.get("name")
        if choice.get("type") != "function" or not isinstance(name, str):
            raise _bad_choice(choice, "it must name a function")
        if name not in [tool["name"] for tool in tools]:
            raise _bad_choice(choice, "`tools` has no such function")
        choice = {"type": "function", "function": {"name": name}}
    elif choice not in ("none", "auto", "required"):
        raise _bad_choice(choice, "it must be none, auto, required, a function or allowed_tools")
    if not tools:
        if needs_tools:
            raise _bad_choice(choice, "`tools` has no function to call")
        return {}
    chat: dict[str, Any] = {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": choice}
    if body.get("parallel_tool_calls") is not None:
        chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    return chat


def _bad_choice(choice: Any, why: str) -> ApiError:
    return ApiError(400, f"`tool_choice`: {why}; got {shown(choice)}", "tool_choice")


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in tool if key != "type" and tool[key] is not None}
    return {"type": "function", "function": function}


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    kind = form.get("type", "text")
    if kind != "json_schema":
        return {"type": kind}
    for name in ("name", "schema"):
        if form.get(name) is None:
            raise ApiError(400, f"Missing `text.format.{name}`", f"text.format.{name}")
    schema = {key: form[key] for key in form if key != "type" and form[key] is not None}
    return {"type": "json_schema", "json_schema": schema}
