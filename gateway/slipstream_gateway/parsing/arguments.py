"""Grammars of arguments that are not JSON: each between tags, or as Python's keywords.

Such forms cannot say every schema. A strict tool with a keyword that its form cannot hold is
refused by name; every text of a grammar is read as arguments that follow the schema, though not
all such arguments have a text.
"""

from collections.abc import Callable, Mapping
from typing import Any

from slipstream_contract.errors import clip

from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.choice import Tool
from slipstream_gateway.parsing.format import Tags
from slipstream_gateway.parsing.lark import ANY_OBJECT, EMPTY, Lark, quoted
from slipstream_gateway.parsing.values import dump, resolve, to_json, types_of

NOTES = {
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"),
    *("readOnly", "writeOnly", "strict", "$defs", "definitions"),
}
_ROOT = {"type", "properties", "required", "additionalProperties"}
_LENGTHS = {"minLength", "maxLength"}
_KEY = r"/[A-Za-z_][0-9A-Za-z_]{0,63}/"
_SCALARS = frozenset({"boolean", "integer", "null", "number"})  # none has a tag in it


def is_enforced(tool: Tool, is_forced: bool) -> bool:
    """Return whether arguments follow the schema: a tool that says nothing does where it must."""
    return tool.is_strict is not False if is_forced else tool.is_strict is True


def object_schema(tool: Tool, is_forced: bool) -> Mapping[str, Any]:
    """Return the schema of arguments as one JSON object. Raises ApiError: they are none."""
    schema = tool.parameters
    if schema is None or not is_enforced(tool, is_forced):
        return ANY_OBJECT
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise Arguments(tool, False).refusal("type", kind)
    return {**schema, "type": "object"}


class Arguments:
    """The properties of a tool's schema in their order."""

    def __init__(self, tool: Tool, is_enforced: bool) -> None:
        """Read a schema. Raises ApiError for what a form without JSON cannot hold."""
        self._where = f"tools: the parameters of {clip(tool.name)}"
        self.is_enforced = is_enforced
        schema: Any = tool.parameters or {}
        if isinstance(reference := schema.get("$ref"), str):
            schema = {**schema, **(resolve(reference, schema) or {})}
            schema.pop("$ref", None)
        self.root: Mapping[str, Any] = schema
        self.properties: Mapping[str, Any] = schema.get("properties") or {}
        self.required = list(schema.get("required") or [])
        if is_enforced:
            self._check(schema)

    def _check(self, schema: Mapping[str, Any]) -> None:
        for keyword in schema:
            if keyword not in _ROOT | NOTES:
                raise self.refusal(keyword)
        if schema.get("type", "object") != "object":
            raise self.refusal("type", schema["type"])
        for name in self.required:
            if name not in self.properties:
                raise self.refusal("required", name)

    def refusal(self, keyword: str, value: object = None) -> ApiError:
        """Return the error for a keyword."""
        what = f"{keyword} {clip(value)}" if value is not None else keyword
        return ApiError(
            400,
            f"{self._where} have {what}, which the tool calls of this model's format cannot be "
            "held to: set strict to false",
            "tools",
        )

    @property
    def is_open(self) -> bool:
        """Whether any names will do: the schema names none, and none is enforced."""
        return not self.is_enforced and not self.properties

    def named(self, is_fit: Callable[[str], bool]) -> list[tuple[str, Any, bool]]:
        """Return name, schema and whether it is needed of properties whose name fits the form."""
        found = []
        for name, schema in self.properties.items():
            is_needed = name in self.required
            if not is_fit(name):
                if is_needed and self.is_enforced:
                    raise self.refusal("the name", name)
                continue
            found.append((name, schema if self.is_enforced else _loose(schema), is_needed))
        return found

    def standing_alone(self, schema: Any) -> Any:
        """Return a property's schema with the definitions that it may refer to."""
        if not isinstance(schema, dict):
            return schema
        return {**self.definitions, **schema}

    @property
    def definitions(self) -> dict[str, Any]:
        """Return the definitions of the schema."""
        return {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}


def _loose(schema: Any) -> Any:
    """Return what a schema says of a value's type alone."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return {"type": kind} if isinstance(kind, str | list) else {}


class TagValues:
    """Values between tags: texts as they are, all else as JSON."""

    def __init__(self, lark: Lark, style: Tags, arguments: Arguments) -> None:
        self._lark = lark
        self._style = style
        self._arguments = arguments
        self._edge = "\n" if style.has_newlines else ""

    def between(self, name: str, schema: Any) -> str:
        """Return the expression of an argument with its tags."""
        types = types_of(schema, self._arguments.root)
        is_text, others = types == {"string"}, types - {"string"}
        ends = {kind: end for end, kind in self._style.key_ends.items()}
        end = ends.get("string" if is_text else "", ends.get(None, ""))
        opening = f"{self._style.key_open}{name}{end}"
        if self._style.value_open:
            opening += f"\n{self._style.value_open}"
        value = self._value(schema, types, others)
        return self._lark.rule(f"{self._lark.say(opening + self._edge)} {value}")

    def _value(self, schema: Any, types: frozenset[str], others: frozenset[str]) -> str:
        closing = self._lark.say(self._edge + self._style.value_close)
        if self._style.is_matched and not self._arguments.is_enforced:
            return self._lark.until(self._style.value_close)
        if self._style.is_matched and types & {"array", "object"}:  # its end may be in a text
            raise self._arguments.refusal("type", sorted(types))
        if (choices := self._choices(schema, types)) is not None:
            return f"{choices} {closing}"
        keywords = set(schema) - NOTES if isinstance(schema, dict) else set()
        if types == {"string"}:
            if not keywords - {"type", "$ref"} and not self._is_reference(schema):
                return self._lark.until(self._style.value_close)
            return f"{self._bounded(schema)} {closing}"
        if keywords <= {"type"} and "string" in types | (set() if types else {"string"}):
            return self._lark.until(self._style.value_close)
        alone = self._arguments.standing_alone(schema)
        if self._style.is_matched and not types:  # is read as a text
            raise self._arguments.refusal(min(keywords), schema[min(keywords)])
        if "string" in types or not types:
            kinds = sorted((others or _SCALARS) & _SCALARS)
            if not kinds:
                raise self._arguments.refusal("type", sorted(types))
            alone = {"allOf": [alone], "type": kinds} | self._definitions(alone)
        return f"{self._lark.json(alone)} {closing}"

    def _definitions(self, schema: Any) -> dict[str, Any]:
        if not isinstance(schema, dict):
            return {}
        return {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}

    def _is_reference(self, schema: Any) -> bool:
        return isinstance(schema, dict) and "$ref" in schema

    def _choices(self, schema: Any, types: frozenset[str]) -> str | None:
        """Return the values of a schema that lists them: those that are read as themselves."""
        if not isinstance(schema, dict) or not {"enum", "const"} & set(schema):
            return None
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise self._arguments.refusal("enum", values)
        texts = []
        for value in values:
            text = value if isinstance(value, str) else dump(value)
            is_same = to_json(text, types) == dump(value)
            if is_same and self._style.value_close not in text and self._is_kept(text):
                texts.append(quoted(text) if text else EMPTY)
        if not texts:
            raise self._arguments.refusal("enum", values)
        return self._lark.any_of(texts)

    def _is_kept(self, text: str) -> bool:
        """Return whether the reader takes nothing from the ends of a text."""
        return text.strip(None if self._style.is_matched else "\n") == text

    def _bounded(self, schema: Any) -> str:
        """Return a text of a bounded length, without the character that starts a tag."""
        if isinstance(schema.get("$ref"), str):
            schema = {**(resolve(schema["$ref"], self._arguments.root) or {}), **schema}
        for keyword in set(schema) - NOTES - _LENGTHS - {"type", "$ref"}:
            raise self._arguments.refusal(keyword, schema[keyword])
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise self._arguments.refusal("minLength", least)
        if self._style.is_matched:
            return self._lark.rule(_without_edges(least, most))
        bound = "" if most is None else most
        return self._lark.rule(f"/[^<\\n]{{{least},{bound}}}/")


def _without_edges(least: int, most: int | None) -> str:
    """Return texts of so many characters without blanks at either end."""
    ways = [EMPTY] if least == 0 else []
    if least <= 1 and most != 0:
        ways.append(r"/[^<\s]/")
    if most is None or most >= 2:
        bound = "" if most is None else most - 2
        ways.append(rf"/[^<\s][^<\n]{{{max(least - 2, 0)},{bound}}}[^<\s]/")
    return " | ".join(ways)


def tag_arguments(lark: Lark, style: Tags, tool: Tool, is_enforced: bool) -> str:
    """Return the expression of arguments between tags, each with the newline before it."""
    arguments = Arguments(tool, is_enforced)
    newline = lark.say("\n")
    if arguments.is_open:
        end = [*style.key_ends][-1]
        value_open = f"\n{style.value_open}" if style.value_open else ""
        edge = "\n" if style.has_newlines else ""
        one = (
            f"{newline} {lark.say(style.key_open)} {_KEY} {lark.say(end + value_open + edge)} "
            f"{lark.until(style.value_close)}"
        )
        return f"({lark.rule(one)})*"
    values = TagValues(lark, style, arguments)
    return lark.joined(
        f"({newline} {values.between(name, schema)}){'' if is_needed else '?'}"
        for name, schema, is_needed in arguments.named(_is_tag_key)
    )


def _is_tag_key(name: str) -> bool:
    return bool(name) and name == name.strip() and not set(name) & set("<>\"'\n")


def python_arguments(lark: Lark, tool: Tool, is_enforced: bool) -> str:
    """Return the expression of keyword arguments, whose values are JSON."""
    arguments = Arguments(tool, is_enforced)
    if arguments.is_open:
        one = lark.rule(f'{_KEY} "=" {lark.json({})}')
        return f'({one} (", " {one})*)?'
    named = [
        (f"{quoted(name + '=')} {lark.json(arguments.standing_alone(schema))}", is_needed)
        for name, schema, is_needed in arguments.named(str.isidentifier)
    ]
    return separated(lark, named)


def separated(lark: Lark, named: list[tuple[str, bool]], comma: str = '", "') -> str:
    """Return parts in their order with commas between those that are there."""
    rest, rest_may_be_empty = "", True  # what follows where something stands before
    alone: list[str] = []  # what may come first
    for expression, is_needed in reversed(named):
        part = lark.rule(expression)
        first = lark.joined([part, rest])
        if is_needed:
            alone = []
        alone.append(first)
        after = lark.rule(lark.joined([comma, part, rest]))
        rest = after if is_needed else lark.rule(f"{after} | {rest or EMPTY}")
        rest_may_be_empty = rest_may_be_empty and not is_needed
    if not alone:
        return EMPTY
    chosen = lark.any_of(alone)
    return f"({chosen})?" if rest_may_be_empty else chosen
