"""Decide whether two JSON schemas certainly share no value.

The answer may be no where they share none, never yes where they share one.
"""

import json
from collections.abc import Iterator
from typing import Any

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")
_MAX_DEPTH = 8  # of references, `allOf` and properties within properties
_MAX_PARTS = 64  # of one schema
_MAX_COMPARISONS = 2000

_Schema = dict[str, Any]


class Budget:
    """Number of comparisons that are left; a schema that needs more is not looked at further."""

    def __init__(self) -> None:
        self._num_left = _MAX_COMPARISONS

    def take(self) -> bool:
        """Return whether one more comparison is allowed."""
        self._num_left -= 1
        return self._num_left >= 0


def are_disjoint(a: Any, b: Any, root: Any, budget: Budget, depth: int = 0) -> bool:
    """Return whether no value can be of both; `root` is what references are to."""
    if depth > _MAX_DEPTH or not budget.take():
        return False
    if a is False or b is False:
        return True
    of_a, of_b = _parts(a, root), _parts(b, root)
    if False in of_a or False in of_b:
        return True
    one, other = ([part for part in parts if isinstance(part, dict)] for parts in (of_a, of_b))
    shared = _types(one) & _types(other)
    if not shared:
        return True
    if _have_no_common_value(one, other):
        return True
    if shared == {"object"}:
        return _differ_in_property(one, other, root, budget, depth)
    if shared <= {"number", "integer"}:
        return _are_apart(one, other, "minimum", "maximum")
    if shared == {"string"}:
        return _are_apart(one, other, "minLength", "maxLength")
    return shared == {"array"} and _are_apart(one, other, "minItems", "maxItems")


def _parts(schema: Any, root: Any) -> list[Any]:
    """Return schemas of which a value has to be all: itself, what it refers to, its `allOf`."""
    found: list[Any] = []
    waiting = [schema]
    while waiting and len(found) < _MAX_PARTS:
        part = waiting.pop()
        found.append(part)
        if not isinstance(part, dict):
            continue
        target = _target(part.get("$ref"), root)
        if target is not None and not any(target is each for each in found):
            waiting.append(target)
        if isinstance(part.get("allOf"), list):
            waiting.extend(part["allOf"])
    return found


def _target(reference: Any, root: Any) -> Any:
    """Return what a reference within the schema is to; None where it is to something else."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return root if reference == "#" else None
    place = root
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None
    return place


def _types(parts: list[_Schema]) -> set[str]:
    """Return the types that a value can have."""
    left = set(TYPES) - {"integer"}
    for part in parts:
        if "type" in part:
            given = part["type"] if isinstance(part["type"], list) else [part["type"]]
            left &= {"number" if each == "integer" else str(each) for each in given}
        if (values := _values([part])) is not None:
            left &= {type_of(value) for value in values}
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                inner = [[each] if isinstance(each, dict) else [] for each in part[key]]
                left &= set().union(*(_own_types(each) for each in inner))
    return left


def _own_types(parts: list[_Schema]) -> set[str]:
    """Return the types of a schema by its `type` and values alone."""
    plain = [{k: v for k, v in part.items() if k not in ("anyOf", "oneOf")} for part in parts]
    return _types(plain)


def type_of(value: Any) -> str:
    """Return the type of a value; every number is a `number`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _values(parts: list[_Schema]) -> list[Any] | None:
    """Return all values that are left by `const` and `enum`; None where any may be."""
    lists = [[part["const"]] for part in parts if "const" in part]
    lists += [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
    if not lists:
        return None
    keys = [{key_of(value) for value in values} for values in lists]
    return [value for value in lists[0] if all(key_of(value) in each for each in keys)]


def key_of(value: Any) -> str:
    """Return the same text for equal values of JSON: 1 and 1.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(key_of, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(k)}:{key_of(v)}' for k, v in sorted(value.items()))}}}"
    return json.dumps(value)


def _have_no_common_value(one: list[_Schema], other: list[_Schema]) -> bool:
    a, b = _values(one), _values(other)
    return a is not None and b is not None and not {*map(key_of, a)} & {*map(key_of, b)}


def _differ_in_property(
    one: list[_Schema], other: list[_Schema], root: Any, budget: Budget, depth: int
) -> bool:
    """Return whether a property that both need differs, or one needs what the other cannot have."""
    needed_a, needed_b = (set(_required(parts)) for parts in (one, other))
    for name in needed_a | needed_b:
        a, b = ([*_of_property(parts, name)] for parts in (one, other))
        if name in needed_a and name in needed_b:
            if are_disjoint({"allOf": a}, {"allOf": b}, root, budget, depth + 1):
                return True
        elif False in (b if name in needed_a else a):
            return True
    return _are_apart(one, other, "minProperties", "maxProperties")


def _required(parts: list[_Schema]) -> Iterator[str]:
    for part in parts:
        if isinstance(part.get("required"), list):
            yield from (name for name in part["required"] if isinstance(name, str))


def _of_property(parts: list[_Schema], name: str) -> Iterator[Any]:
    """Yield schemas that the value of a property is of, each; False: it cannot be there."""
    for part in parts:
        own = part.get("properties")
        if isinstance(own, dict) and name in own:
            yield own[name]
        elif "additionalProperties" in part and not part.get("patternProperties"):
            yield part["additionalProperties"]


def _are_apart(one: list[_Schema], other: list[_Schema], least: str, most: str) -> bool:
    """Return whether the least of one is above the most of the other."""

    def bound(parts: list[_Schema], key: str) -> list[float]:
        values = [part[key] for part in parts if key in part]
        return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]

    pairs = ((one, other), (other, one))
    return any(
        max(bound(a, least), default=float("-inf")) > min(bound(b, most), default=float("inf"))
        for a, b in pairs
    )
