"""Rewrite JSON schemas, exactly, so that the library serves more of them.

- `oneOf` whose branches no value can share is `anyOf`. The library has `oneOf` only where it sees
  that itself; `disjoint` sees more.
- `dependentRequired`, `dependentSchemas` and the older `dependencies` are alternatives: without the
  property, or with what it depends on.
- `not` is said by what else there is (`negation`); so are `if` with `then` and `else`, by two
  cases, and a `oneOf` of few branches that share values.
- `propertyNames` of a pattern or of names is said by `patternProperties` or `properties`.
- `format` is a note where the library does not know its value, as JSON Schema has it.
- `uniqueItems` says nothing of arrays of at most one item; where few items are possible, the arrays
  are named one by one.

What is not rewritten stays, and the library refuses it by name. All annotations stay.
"""

from itertools import permutations
from math import perm
from typing import Any

from slipstream.guide.disjoint import TYPES, Budget, are_disjoint, key_of, type_of
from slipstream.guide.negation import any_of, negate

# Keywords whose value is a schema, a list of schemas, an object of schemas.
_ONE = (
    *("additionalProperties", "additionalItems", "contains", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_SEVERAL = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = (
    *("$defs", "definitions", "dependencies", "dependentSchemas"),
    *("patternProperties", "properties"),
)
_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown"),
        *("uri", "uuid"),
    }
)
_MAX_DEPENDENCIES = 16  # of one schema: each doubles the alternatives
_MAX_BRANCHES = 8
_MAX_ARRAYS = 400


def prepare(schema: Any, is_closed: bool = False) -> Any:
    """Return a schema that describes the same values.

    With `is_closed`, objects that say nothing of other properties have none, which is another
    schema: vLLM's `disable_additional_properties`.
    """
    return _Preparation(schema, is_closed).of(schema)


class _Preparation:
    """A schema on its way; references in it are to the whole."""

    def __init__(self, root: Any, is_closed: bool) -> None:
        self._root = root
        self._is_closed = is_closed
        self._budget = Budget()

    def of(self, schema: Any) -> Any:
        """Return a schema of the same values, and all schemas in it so."""
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        is_disjoint = self._is_one_of_disjoint(schema)
        for key in _ONE:
            if isinstance(made.get(key), dict):
                made[key] = self.of(made[key])
        for key in _SEVERAL:
            if isinstance(made.get(key), list):
                made[key] = [self.of(each) for each in made[key]]
        for key in _NAMED:
            if isinstance(made.get(key), dict):
                made[key] = {name: self.of(each) for name, each in made[key].items()}
        if is_disjoint:
            _add_all(made, [{"anyOf": made.pop("oneOf")}])
        for rewrite in _REWRITES:
            rewrite(made)
        if self._is_closed and ("properties" in made or made.get("type") == "object"):
            made.setdefault("additionalProperties", False)
        return made

    def _is_one_of_disjoint(self, schema: dict[str, Any]) -> bool:
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or not branches or len(branches) > 64:
            return False
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        return all(
            are_disjoint({"allOf": [a, rest]}, {"allOf": [b, rest]}, self._root, self._budget)
            for i, a in enumerate(branches)
            for b in branches[:i]
        )


def _add_all(schema: dict[str, Any], conditions: list[Any]) -> None:
    """Add conditions that hold beside all others."""
    if len(conditions) == 1 and isinstance(conditions[0], dict):
        (condition,) = conditions
        if not condition.keys() & schema.keys():
            schema.update(condition)
            return
    before = schema.get("allOf")
    schema["allOf"] = [*(before if isinstance(before, list) else []), *conditions]


def _drop_notes(schema: dict[str, Any]) -> None:
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del schema["format"]
    most = schema.get("maxItems")
    is_short = isinstance(most, int) and most <= 1
    if schema.get("uniqueItems") is False or (is_short and schema.get("uniqueItems") is True):
        del schema["uniqueItems"]


def _split_dependencies(schema: dict[str, Any]) -> None:
    """Say what a property depends on by alternatives."""
    conditions = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        given = schema.get(key)
        if not isinstance(given, dict) or len(given) > _MAX_DEPENDENCIES:
            continue
        del schema[key]
        for name, wanted in given.items():
            if isinstance(wanted, list):
                if not wanted:
                    continue
                present: dict[str, Any] = {"required": [name, *wanted]}
            else:
                present = {"required": [name], "allOf": [wanted]}
            absent = {"properties": {name: False}}
            conditions.append({"anyOf": [absent, {"type": "object", **present}]})
    if conditions:
        _add_all(schema, conditions)


def _add_any(schema: dict[str, Any], alternatives: list[Any]) -> None:
    """Add alternatives, without those of other types."""
    given = schema.get("type")
    if given is not None:
        types = {"number" if each == "integer" else each for each in _as_list(given)}
        alternatives = [each for each in alternatives if _may_be(each, types)]
    _add_all(schema, [any_of(alternatives)])


def _may_be(alternative: Any, types: set[str]) -> bool:
    if not isinstance(alternative, dict) or "type" not in alternative:
        return True
    return not types.isdisjoint(_as_list(alternative["type"]))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resolve_not(schema: dict[str, Any]) -> None:
    """Say `not` by what else there is."""
    if "not" in schema and (others := negate(schema["not"])) is not None:
        del schema["not"]
        if {} not in others:
            _add_any(schema, others)


def _resolve_if(schema: dict[str, Any]) -> None:
    """Say a condition by its two cases."""
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
        return
    others = negate(schema["if"])
    if others is None:
        return
    condition, yes, no = (schema.pop(key, True) for key in ("if", "then", "else"))
    cases = [_both(condition, yes), *(_both(other, no) for other in others)]
    _add_any(schema, [case for case in cases if case is not False])


def _both(one: Any, other: Any) -> Any:
    """Return what is of two schemas."""
    if one is False or other is False:
        return False
    parts = [each for each in (one, other) if each is not True and each != {}]
    return {"allOf": parts} if len(parts) > 1 else (parts or [{}])[0]


def _split_one_of(schema: dict[str, Any]) -> None:
    """Say `oneOf` of a few branches that share values: one of them, and none of the others."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or not 0 < len(branches) <= _MAX_BRANCHES:
        return
    wrong = [negate(branch) for branch in branches]
    if None in wrong:
        return
    del schema["oneOf"]
    cases = []
    for number, branch in enumerate(branches):
        others = [any_of(some or []) for other, some in enumerate(wrong) if other != number]
        cases.append({"allOf": [branch, *others]})
    _add_all(schema, [{"anyOf": cases}])


def _name_properties(schema: dict[str, Any]) -> None:
    """Say `propertyNames` by the patterns that properties have, where it is one or names them."""
    given = schema.get("propertyNames")
    if given is True or given == {}:
        del schema["propertyNames"]
        return
    own = schema.get("properties", {})
    if not isinstance(given, dict) or not isinstance(own, dict) or "patternProperties" in schema:
        return
    if own and not _is_open(schema):
        return
    keys = given.keys() - {"type", "description"}
    if given.get("type", "string") != "string" or len(keys) != 1:
        return
    others = schema.get("additionalProperties", True)
    if keys == {"pattern"} and isinstance(given["pattern"], str) and not own:
        schema["patternProperties"] = {given["pattern"]: others}
    elif keys == {"enum"} and isinstance(given["enum"], list):
        names = [name for name in given["enum"] if isinstance(name, str)]
        kept = {name: own.get(name, others) for name in names}
        schema["properties"] = kept | {name: False for name in own if name not in kept}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _require_one(schema: dict[str, Any]) -> None:
    """Say that a closed object has a property by which one that is."""
    names = schema.get("properties")
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if schema.get("minProperties") == 1 and is_closed and isinstance(names, dict):
        del schema["minProperties"]
        others = [name for name in TYPES if name not in ("object", "integer")]
        needed = [{"type": "object", "required": [name]} for name in names]
        _add_any(schema, [{"type": others}, *needed])


def _is_open(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties", True) in (True, {})


def _enumerate_unique(schema: dict[str, Any]) -> None:
    """Say `uniqueItems` of few possible items by all arrays of them."""
    items = schema.get("items")
    if schema.get("uniqueItems") is not True or not isinstance(items, dict):
        return
    values = items.get("enum", [True, False] if items.get("type") == "boolean" else None)
    rest = items.keys() - {"type", "enum", "title", "description"}
    if not isinstance(values, list) or rest or "prefixItems" in schema:
        return
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    values = [value for value in values if "type" not in items or _is_of(value, items["type"])]
    if len({key_of(value) for value in values}) < len(values) or not _are_counts(least, most):
        return
    sizes = range(least, min(most, len(values)) + 1)
    if sum(perm(len(values), size) for size in sizes) > _MAX_ARRAYS:
        return
    for key in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(key, None)
    arrays = [list(each) for size in sizes for each in permutations(values, size)]
    others = [name for name in TYPES if name not in ("array", "integer")]
    _add_any(schema, [{"type": others}, {"type": "array", "enum": arrays}])


def _is_of(value: Any, types: Any) -> bool:
    own = type_of(value)
    is_whole = own == "number" and float(value).is_integer()
    return own in _as_list(types) or (is_whole and "integer" in _as_list(types))


def _are_counts(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


_REWRITES = (
    *(_drop_notes, _split_dependencies, _resolve_if, _resolve_not, _split_one_of),
    *(_name_properties, _require_one, _enumerate_unique),
)
