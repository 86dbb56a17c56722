"""Say what a JSON schema does not allow by schemas without `not`: exactly, or not at all.

A value breaks a schema if it breaks one of its keywords, so a negation is a list of alternatives,
each a schema. Numbers beside a value are ranges; texts beside words are an expression. What has no
such form (`pattern`, `items`, `$ref`, a fraction beside integers) has no negation here.
"""

from collections.abc import Callable
from typing import Any

from slipstream.guide.disjoint import TYPES, type_of

Schema = Any
_ANNOTATIONS = frozenset(
    {
        *("$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly"),
        *("title", "writeOnly"),
    }
)
_MAX_WORDS = 512  # characters of all texts that a text must differ from
_MAX_DEPTH = 8
_NAMES = [name for name in TYPES if name != "integer"]


def negate(schema: Schema, depth: int = 0) -> list[Schema] | None:
    """Return schemas that together describe all other values; None where they cannot be said."""
    if schema is True or schema is False:
        return [] if schema else [{}]
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    found: list[Schema] = []
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        made = _NEGATED[key](value, depth) if key in _NEGATED else None
        if made is None:
            return None
        found += [each for each in made if each not in found]
    return found


def any_of(alternatives: list[Schema]) -> Schema:
    """Return one schema of alternatives, which may be none."""
    if len(alternatives) == 1:
        return alternatives[0]
    return {"anyOf": alternatives} if alternatives else False


def without(words: set[str]) -> str:
    """Return an expression of all texts but some, without anchors."""
    if not words:
        return r"[\s\S]*"
    firsts = sorted({word[0] for word in words if word})
    parts = [] if "" in words else [""]
    parts.append(rf"[^{''.join(map(_escaped, firsts))}][\s\S]*" if firsts else r"[\s\S]+")
    for first in firsts:
        rest = {word[1:] for word in words if word[:1] == first}
        parts.append(f"{_escaped(first)}(?:{without(rest)})")
    return "|".join(parts)


def _escaped(character: str) -> str:
    is_mark = character.isascii() and not character.isalnum() and character.isprintable()
    return f"\\{character}" if is_mark and character not in " <>" else character


def _beside(*types: str) -> list[Schema]:
    """Return the values of no such type."""
    others = [name for name in _NAMES if name not in types]
    return [{"type": others}] if others else []


def _type(value: Any, depth: int) -> list[Schema] | None:
    types = value if isinstance(value, list) else [value]
    if "integer" in types and "number" not in types:
        return None  # other numbers are no type
    return _beside(*types)


def _enum(values: Any, depth: int) -> list[Schema] | None:
    if not isinstance(values, list):
        return None
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    if {"array", "object"} & by_type.keys() or sum(
        map(len, by_type.get("string", []))
    ) > _MAX_WORDS:
        return None
    found = _beside(*by_type)
    if "string" in by_type:
        pattern = f"^(?:{without(set(by_type['string']))})$"
        found.append({"type": "string", "pattern": pattern})
    if "number" in by_type:
        numbers = sorted(set(by_type["number"]))
        lows = [{}, *({"exclusiveMinimum": number} for number in numbers)]
        highs = [*({"exclusiveMaximum": number} for number in numbers), {}]
        found += [{"type": "number", **a, **b} for a, b in zip(lows, highs, strict=True)]
    if "boolean" in by_type:
        found += [{"const": flag} for flag in (False, True) if flag not in by_type["boolean"]]
    return found


def _bound(kind: str, opposite: str, step: int) -> Callable[[Any, int], list[Schema] | None]:
    """Return the negation of a bound on values of a kind: those beyond it by `step`."""

    def negated(value: Any, depth: int) -> list[Schema] | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if kind != "number" and value + step < 0:
            return []
        return [{"type": kind, opposite: value + step}]

    return negated


def _required(names: Any, depth: int) -> list[Schema] | None:
    if not isinstance(names, list):
        return None
    return [{"type": "object", "properties": {name: False}} for name in names]


def _properties(given: Any, depth: int) -> list[Schema] | None:
    if not isinstance(given, dict):
        return None
    found: list[Schema] = []
    for name, inner in given.items():
        wrong = negate(inner, depth + 1)
        if wrong is None:
            return None
        if wrong:
            properties = {name: any_of(wrong)}
            found.append({"type": "object", "required": [name], "properties": properties})
    return found


def _all_of(parts: Any, depth: int) -> list[Schema] | None:
    if not isinstance(parts, list):
        return None
    made = [negate(part, depth + 1) for part in parts]
    return None if None in made else [each for some in made for each in some or ()]


def _any_of(parts: Any, depth: int) -> list[Schema] | None:
    if not isinstance(parts, list):
        return None
    made = [negate(part, depth + 1) for part in parts]
    return None if None in made else [{"allOf": [any_of(some or []) for some in made]}]


_NEGATED: dict[str, Callable[[Any, int], list[Schema] | None]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value, depth: _enum([value], depth),
    "required": _required,
    "properties": _properties,
    "allOf": _all_of,
    "anyOf": _any_of,
    "not": lambda schema, depth: [schema],
    "additionalProperties": lambda value, depth: [] if value is True or value == {} else None,
    "minimum": _bound("number", "exclusiveMaximum", 0),
    "maximum": _bound("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": _bound("number", "maximum", 0),
    "exclusiveMaximum": _bound("number", "minimum", 0),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1),
    "maxProperties": _bound("object", "minProperties", 1),
}
