"""The tools of a request, and which of them an answer may or must call."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from slipstream_contract.errors import clip

from slipstream_gateway.errors import ApiError

MAX_TOOLS = 1024
Mode = Literal["none", "auto", "required", "named"]


class Tool(msgspec.Struct, frozen=True):
    """A function that an answer may call.

    Attributes:
        name: of the function.
        parameters: the JSON schema of its arguments; None: any object.
        is_strict: whether arguments must follow the schema; None: the request does not say.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    is_strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """The tools of a request, those that may be called, and whether one must be.

    Attributes:
        mode: `none`, `auto` (may), `required` (must), `named` (must call the one allowed).
        tools: all that the prompt shows.
        allowed: those that may be called.
        is_parallel: whether an answer may have several calls.
    """

    mode: Mode = "none"
    tools: tuple[Tool, ...] = ()
    allowed: tuple[Tool, ...] = ()
    is_parallel: bool = True

    @property
    def must_call(self) -> bool:
        """Whether an answer has to have a call."""
        return self.mode in ("required", "named")

    @property
    def is_guided(self) -> bool:
        """Whether a grammar holds: a call must come, or only one may, or a tool is strict."""
        is_one = bool(self.allowed) and not self.is_parallel
        return self.must_call or is_one or any(tool.is_strict for tool in self.allowed)

    @property
    def schemas(self) -> dict[str, Any]:
        """Return name -> schema of the arguments."""
        return {tool.name: tool.parameters for tool in self.tools}


def read_choice(
    tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolChoice:
    """Return what a chat request says of tools. Raises ApiError naming the field."""
    given = _read_tools(tools)
    if not isinstance(parallel_tool_calls, bool | None):
        raise _wrong("parallel_tool_calls", f"{clip(parallel_tool_calls)}, not true or false")
    is_parallel = parallel_tool_calls is not False
    if tool_choice is None:
        tool_choice = "auto" if given else "none"
    if isinstance(tool_choice, str):
        if tool_choice == "required" and not given:
            raise _wrong("tool_choice", "required, but tools is empty")
        if tool_choice in ("auto", "required") and given:
            return ToolChoice(tool_choice, given, given, is_parallel)  # type: ignore[arg-type]
        if tool_choice in ("none", "auto"):
            return ToolChoice("none", given, (), is_parallel)
        raise _wrong("tool_choice", f"{clip(tool_choice)}, not none, auto, required or an object")
    if not isinstance(tool_choice, Mapping):
        raise _wrong("tool_choice", f"{clip(tool_choice)}, neither a text nor an object")
    if tool_choice.get("type") == "allowed_tools":
        return _read_allowed(tool_choice, given, is_parallel)
    name = _name_of(tool_choice, "tool_choice")
    return ToolChoice("named", given, (_find(name, given, "tool_choice"),), is_parallel)


def shown_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates read them; None: there are none.

    A function may lack its description or its parameters, which many templates write down unasked:
    then it has an empty text, and the schema of an object without properties. Raises ApiError.
    """
    if not _read_tools(tools):
        return None
    assert isinstance(tools, Sequence)
    return [{**tool, "function": _completed(tool["function"])} for tool in tools]


def _completed(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {name: value for name, value in function.items() if value is not None}
    if "description" in given and given.get("parameters"):
        return function
    parameters = given.pop("parameters", None) or {"type": "object", "properties": {}}
    named = {"name": function["name"], "description": ""}
    return {**named, **given, "parameters": parameters}


def _read_tools(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise _wrong("tools", f"{clip(tools)}, not a list")
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"{len(tools)} tools, at most {MAX_TOOLS} are served", "has")
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise _wrong(field, f"{clip(tool)}, not an object")
        if tool.get("type", "function") != "function":
            raise _wrong(f"{field}.type", f"{clip(tool['type'])}, only function is served")
        name = _name_of(tool, field)
        if name in found:
            raise _wrong(f"{field}.function.name", f"{clip(name)}, which another tool has")
        found[name] = _read_function(name, tool["function"], f"{field}.function")
    return tuple(found.values())


def _read_function(name: str, function: Mapping[str, Any], field: str) -> Tool:
    parameters, strict = function.get("parameters"), function.get("strict")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong(f"{field}.parameters", f"{clip(parameters)}, not a JSON schema")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{field}.strict", f"{clip(strict)}, not true or false")
    return Tool(name, parameters, strict)


def _name_of(value: Mapping[str, Any], field: str) -> str:
    function = value.get("function")
    if value.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise _wrong(field, f"{clip(dict(value))}, which names no function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{field}.function.name", f"{clip(name)}, not a name")
    return name


def _find(name: str, tools: tuple[Tool, ...], field: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none"
    raise _wrong(field, f"{clip(name)}, but the tools are {clip(known)}", "names")


def _read_allowed(
    choice: Mapping[str, Any], tools: tuple[Tool, ...], is_parallel: bool
) -> ToolChoice:
    field = "tool_choice.allowed_tools"
    inner = choice.get("allowed_tools", choice)  # chat completions nest it, responses do not
    if not isinstance(inner, Mapping):
        raise _wrong(field, f"{clip(inner)}, not an object")
    mode, listed = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise _wrong(f"{field}.mode", f"{clip(mode)}, not auto or required")
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not listed:
        raise _wrong(f"{field}.tools", f"{clip(listed)}, not a list of functions")
    allowed: dict[str, Tool] = {}
    for index, each in enumerate(listed):
        where = f"{field}.tools[{index}]"
        if not isinstance(each, Mapping):
            raise _wrong(where, f"{clip(each)}, not an object")
        each = each if "function" in each else {"function": each}
        name = _name_of(each, where)
        allowed[name] = _find(name, tools, where)
    return ToolChoice(mode, tools, tuple(allowed.values()), is_parallel)


def _wrong(field: str, problem: str, verb: str = "is") -> ApiError:
    return ApiError(400, f"{field} {verb} {problem}", field)
