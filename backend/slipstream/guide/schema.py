"""Rewrite JSON schemas, exactly, so that the library serves more of them.

- `oneOf` whose branches no value can share is `anyOf`. The library has `oneOf` only where it sees
  that itself; `disjoint` sees more.
- `dependentRequired`, `dependentSchemas` and the older `dependencies` are alternatives: without the
  property, or with what it depends on.
- `not` of a type, of `required`, and of everything is said without `not`.
- `format` is a note where the library does not know its value, as JSON Schema has it.
- `uniqueItems` says nothing of arrays of at most one item.

What is not rewritten stays, and the library refuses it by name. All annotations stay.
"""

from typing import Any

from slipstream.guide.disjoint import TYPES, Budget, are_disjoint

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
        _drop_notes(made)
        _split_dependencies(made)
        _resolve_not(made)
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


def _resolve_not(schema: dict[str, Any]) -> None:
    """Say `not` without it, where it is of a type, of `required` alone, or of everything."""
    wrong = schema.get("not")
    if wrong is True or wrong == {}:
        del schema["not"]
        _add_all(schema, [False])
    elif wrong is False:
        del schema["not"]
    elif isinstance(wrong, dict) and wrong.keys() == {"type"} and "type" not in schema:
        types = wrong["type"] if isinstance(wrong["type"], list) else [wrong["type"]]
        if "integer" in types and "number" not in types:
            return  # other numbers are no type
        schema["type"] = [each for each in TYPES if each not in types and each != "integer"]
        del schema["not"]
    elif isinstance(wrong, dict) and wrong.keys() == {"required"} and _is_object(schema):
        names = wrong["required"]
        if isinstance(names, list) and names:
            del schema["not"]
            _add_all(schema, [{"anyOf": [{"properties": {name: False}} for name in names]}])


def _is_object(schema: dict[str, Any]) -> bool:
    return schema.get("type") in ("object", ["object"])
