"""A grammar of JSON whose texts stand between marks, and whose keys may be bare words.

Such texts have no escapes, so that a schema is said value by value here. What it may have:
`type`, `properties`, `required`, `items`, `minItems`, `maxItems`, `enum`, `const`, `anyOf` and
references; all that it says of numbers; all else is refused by name.
"""

import re
from collections.abc import Mapping
from typing import Any

from slipstream_gateway.parsing.arguments import NOTES, Arguments, separated
from slipstream_gateway.parsing.choice import Tool
from slipstream_gateway.parsing.lark import Lark
from slipstream_gateway.parsing.patterns import UnsayableError
from slipstream_gateway.parsing.values import dump, resolve, types_of

_TEXT = r"/[^\x01\x02]*/"  # the reader's own marks
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_SCALARS = frozenset(("boolean", "integer", "null", "number"))
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": set(),
}
_MAX_DEPTH = 16
# The reader knows no number beyond doubles.
_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/"
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class MarkedJson:
    """Values in one template's form."""

    def __init__(self, lark: Lark, args: Mapping[str, Any]) -> None:
        """Read `content_args`. Raises UnsayableError."""
        marks = args.get("string_delims") or []
        if not marks:
            raise UnsayableError("its keys are bare, but its texts stand between no marks")
        self._lark = lark
        self._open, self._close = marks[0]
        self._is_bare = bool(args.get("unquoted_keys"))
        self._any: str | None = None

    def key(self, name: str) -> str:
        """Return a key. Raises UnsayableError."""
        if _WORD.fullmatch(name) is None:
            raise UnsayableError(f"its transform has the key {name!r}")
        return name if self._is_bare else dump(name)

    def text(self, text: str) -> str:
        """Return a text between marks. Raises UnsayableError."""
        if self._close in text or not text.isprintable():
            raise UnsayableError(f"no mark can stand around {text!r}")
        return f"{self._open}{text}{self._close}"

    def arguments(self, tool: Tool, is_enforced: bool) -> str:
        """Return the expression of a tool's arguments. Raises ApiError, UnsayableError."""
        arguments = Arguments(tool, is_enforced)
        if arguments.is_open:
            return self._object_of_any()
        return self._object(arguments, is_enforced, 0)

    def _object(self, arguments: Arguments, is_enforced: bool, depth: int) -> str:
        found = []
        for name, schema, is_needed in arguments.named(lambda name: bool(_WORD.fullmatch(name))):
            value = self._value(schema, arguments, is_enforced, depth + 1)
            found.append((f"{self._lark.say(self.key(name) + ':')} {value}", is_needed))
        inner = separated(self._lark, found, '","')
        return self._lark.rule(f'"{{" {inner} "}}"')

    # --- values ----------------------------------------------------------------------------------

    def _value(self, schema: Any, arguments: Arguments, is_enforced: bool, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise arguments.refusal("$ref", "nested more than 16 deep")
        if schema is True or not isinstance(schema, dict) or not set(schema) - NOTES:
            return self._anything()
        if isinstance(reference := schema.get("$ref"), str):
            schema = {**(resolve(reference, arguments.root) or {}), **schema}
            del schema["$ref"]
            return self._value(schema, arguments, is_enforced, depth + 1)
        if "enum" in schema or "const" in schema:
            return self._choices(schema, arguments)
        if isinstance(ways := schema.get("anyOf"), list) and not set(schema) - NOTES - {"anyOf"}:
            return self._lark.any_of(
                self._value(way, arguments, is_enforced, depth + 1) for way in ways
            )
        types = types_of(schema, arguments.root) if "type" in schema else _ANY
        found = [self._typed(kind, schema, arguments, is_enforced, depth) for kind in sorted(types)]
        return self._lark.any_of(found)

    def _typed(
        self,
        kind: str,
        schema: Mapping[str, Any],
        arguments: Arguments,
        is_enforced: bool,
        depth: int,
    ) -> str:
        if kind in _SCALARS:
            if kind == "number" and not set(schema) & _LIMITS:
                return _NUMBER
            return self._lark.json({**schema, "type": kind})
        own = set(schema) - NOTES - {"type"}
        if kind not in _KEYWORDS or own - _KEYWORDS[kind]:
            keyword = min(own - _KEYWORDS.get(kind, set()), default="type")
            raise arguments.refusal(keyword, schema.get(keyword))
        if kind == "string":
            return self._any_text()
        if not own:
            return self._object_of_any() if kind == "object" else self._list_of(self._anything())
        if kind == "array":
            item = self._value(schema.get("items", True), arguments, is_enforced, depth + 1)
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if not isinstance(least, int) or not isinstance(most, int | None):
                raise arguments.refusal("minItems", least)
            return self._list_of(item, least, most)
        tool = Tool("", {**arguments.definitions, **schema}, True)
        return self._object(Arguments(tool, is_enforced), is_enforced, depth)

    def _choices(self, schema: Mapping[str, Any], arguments: Arguments) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        texts = []
        for value in values if isinstance(values, list) else []:
            if isinstance(value, str) and self._close not in value and value.isprintable():
                texts.append(self._lark.say(self.text(value)))
            elif isinstance(value, bool | int | float | None):
                texts.append(self._lark.say(dump(value)))
        if not texts:
            raise arguments.refusal("enum", values)
        return self._lark.any_of(texts)

    def _any_text(self) -> str:
        inner = self._lark.until(self._close, _TEXT)
        return self._lark.rule(f"{self._lark.say(self._open)} {inner}")

    def _list_of(self, item: str, least: int = 0, most: int | None = None) -> str:
        more = f'("," {item})'
        bound = "" if most is None else max(most - 1, 0)
        several = f"{item} {more}{{{max(least - 1, 0)},{bound}}}"
        if most == 0:
            return '"[]"'
        inner = several if least else f"({several})?"
        return self._lark.rule(f'"[" {inner} "]"')

    def _anything(self) -> str:
        if self._any is None:
            self._any = self._lark.recursive(
                lambda own: " | ".join(
                    (
                        self._lark.json({"type": sorted(_SCALARS - {"number"})}),
                        _NUMBER,
                        self._any_text(),
                        self._list_of(own),
                        self._members(own),
                    )
                )
            )
        return self._any

    def _object_of_any(self) -> str:
        return self._lark.rule(self._members(self._anything()))

    def _members(self, value: str) -> str:
        colon = '":"' if self._is_bare else '"\\":"'
        edge = "" if self._is_bare else '"\\"" '
        one = self._lark.rule(f"{edge}/[A-Za-z_][0-9A-Za-z_]{{0,63}}/ {colon} {value}")
        return f'"{{" ({one} ("," {one})*)? "}}"'
