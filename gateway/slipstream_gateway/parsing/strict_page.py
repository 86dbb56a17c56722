"""The table of what a strict schema may have in each form of calls: docs/tools.md.

Each keyword is tried: a form either makes a grammar of it or refuses it by name.
"""

from collections.abc import Mapping
from typing import Any

from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.answers import Answers, format_of
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_gateway.parsing.formats import CALLS, HARMONY

_TEXT = {"type": "string"}
_OF_TEXTS: Mapping[str, Any] = {
    "minLength": 1,
    "maxLength": 4,
    "pattern": "^a+$",
    "format": "date",
    "enum": ["a", "b"],
    "const": "a",
}
_OF_OTHERS: Mapping[str, Any] = {
    "a number's `minimum`, `multipleOf`": {"type": "integer", "minimum": 1, "multipleOf": 2},
    "a list's `items`, `maxItems`": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    "an object with properties": {"type": "object", "properties": {"b": {"type": "integer"}}},
    "several types": {"type": ["integer", "string", "null"]},
    "`anyOf`": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "`$ref`": {"$ref": "#/$defs/d"},
    "no type": {},
}
_OF_ROOTS: Mapping[str, Any] = {
    "required": ["a"],
    "additionalProperties": False,
    "minProperties": 1,  # of a closed object
    "patternProperties": {"^b": _TEXT},
    "propertyNames": {"enum": ["a"]},
    "anyOf": [{"required": ["a"]}],
    "not": {"required": ["b"]},
}


def schemas() -> dict[str, dict[str, Any]]:
    """Return what is tried: its name in the table -> the schema of a tool's arguments."""
    found = {}
    for keyword, value in _OF_TEXTS.items():
        found[f"a text's `{keyword}`"] = _root({**_TEXT, keyword: value})
    for name, inner in _OF_OTHERS.items():
        found[name] = _root(inner)
    for keyword, value in _OF_ROOTS.items():
        closed = {"additionalProperties": False} if keyword == "minProperties" else {}
        found[f"the root's `{keyword}`"] = {**_root(_TEXT), keyword: value, **closed}
    return found


def _root(inner: Mapping[str, Any]) -> dict[str, Any]:
    definitions = {"$defs": {"d": {"type": "integer"}}} if "$ref" in inner else {}
    return {"type": "object", "properties": {"a": inner}, **definitions}


def is_held(name: str, schema: Mapping[str, Any]) -> bool:
    """Return whether calls in a format are held to a strict schema; False: it is refused."""
    function = {"name": "f", "parameters": schema, "strict": True}
    choice = read_choice([{"type": "function", "function": function}], "required")
    answers = Answers(format_of(name, None), AddedTokens({}))
    try:
        return answers.guide(choice, "") is not None
    except ApiError as error:
        if error.param != "tools":
            raise
        return False


def markdown() -> str:
    """Return the table: a row for each keyword, a column for formats that agree on all."""
    tried = schemas()
    columns: dict[tuple[bool, ...], list[str]] = {}
    for name in (*CALLS, HARMONY):
        held = tuple(is_held(name, schema) for schema in tried.values())
        columns.setdefault(held, []).append(name)
    heads = [", ".join(f"`{name}`" for name in names) for names in columns.values()]
    lines = [f"| strict schema | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for row, name in enumerate(tried):
        cells = ["held" if held[row] else "refused" for held in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
