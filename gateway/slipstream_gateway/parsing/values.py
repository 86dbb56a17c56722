"""Turn the text of an argument into JSON, by the type that its tool's schema declares."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

# The texts are a model's: what Python thinks of their escapes is no news for a log.
warnings.filterwarnings("ignore", "invalid (octal )?escape sequence")

_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}
_MAX_NESTING = 100
_MAX_DIGITS = 4000  # that Python turns into a whole number
_NAMES = {"true": True, "false": False, "null": None}  # beside Python's own


class NotJsonError(ValueError):
    """A text that is no value."""


class Written(float):
    """A number as JSON has it: `text` is what was written, which may be beyond a double."""

    text: str

    def __new__(cls, text: str) -> "Written":
        """Return the number; as a float it is the nearest, or infinite."""
        made = super().__new__(cls, text)
        made.text = text
        return made


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema names; empty: any."""
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset([declared])
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(type_of(value) for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list):
            found = [types_of(part, root, depth + 1) for part in parts]
            if key == "allOf":
                found = [part for part in found if part][:1]
            return frozenset() if not all(found) else frozenset().union(*found)
    return frozenset()


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what `#/...` refers to; None where there is nothing."""
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if not isinstance(value, dict):
            return None
        value = value.get(part.replace("~1", "/").replace("~0", "~"))
    return value


def type_of(value: object) -> str:
    """Return the name of a JSON value's type."""
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return "null" if value is None else names.get(type(value), "string")


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument: of a declared type where the text fits, else a string.

    What is JSON of the type stays as it is written. Without declared types a text that is JSON,
    other than a string, is that value.
    """
    if types == {"string"}:
        return dump(text)
    wanted = (types or frozenset(_KINDS)) - {"string"}
    stripped = text.strip()
    if types:
        stripped = _WORDS_JSON.get(stripped, stripped)
    try:
        value = json.loads(
            stripped, parse_constant=_refuse, parse_int=_an_int, parse_float=_a_float
        )
        if _is_of(value, wanted):
            return stripped
    except (ValueError, RecursionError):
        pass
    if types:  # without, a Python literal is more likely a text
        try:
            value = read_python(stripped)
        except NotJsonError:
            return dump(text)
        if "integer" in wanted and isinstance(value, float) and value.is_integer():
            value = int(value)
        if _is_of(value, wanted):
            return dump(value)
    return dump(text)


def _is_of(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _KINDS[name]) for name in types if name in _KINDS)


def _an_int(text: str) -> int:
    return 0  # of any length


def _a_float(text: str) -> float:
    return 0.5


_WORDS_JSON = {"True": "true", "False": "false", "None": "null"}


def dump(value: object) -> str:
    """Return the JSON of a value; lone surrogates, which UTF-8 lacks, as escapes."""
    text = _written(value)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _written(value: object) -> str:
    if isinstance(value, Written):
        return value.text
    if isinstance(value, dict):
        pairs = (f"{_written(key)}: {_written(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return json.dumps(value, ensure_ascii=False)


def literal_to_json(text: str) -> str:
    """Return the JSON of a Python literal: JSON as it is written, a text where it is neither."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=_an_int, parse_float=_a_float)
    except (ValueError, RecursionError):
        try:
            return dump(read_python(text))
        except NotJsonError:
            return dump(text)
    return text


def read_json(text: str) -> Any:
    """Return the value of a JSON text, from which `dump` makes it again. Raises NotJsonError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except (ValueError, RecursionError) as error:
        raise NotJsonError(str(error)) from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else Written(text)


def _int(text: str) -> int | float:
    return int(text) if len(text) <= _MAX_DIGITS else Written(text)


def read_python(text: str) -> Any:
    """Return the JSON value of a Python literal. Raises NotJsonError."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotJsonError(str(error)) from None


def _value(node: ast.expr, depth: int) -> Any:
    """Return the value of a syntax tree. Raises NotJsonError."""
    if depth > _MAX_NESTING:
        raise NotJsonError("nested too deeply")
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            if isinstance(value, float) and not math.isfinite(value):
                raise NotJsonError("not finite")
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=number)):
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [_value(part, depth + 1) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {
                _key(key, depth + 1): _value(value, depth + 1)
                for key, value in zip(keys, values, strict=True)
            }
    raise NotJsonError(f"{type(node).__name__} is no literal")


def _key(node: ast.expr | None, depth: int) -> str:
    if node is None:
        raise NotJsonError("** is no literal")
    key = _value(node, depth)
    if isinstance(key, dict | list):
        raise NotJsonError("a key that is no text")
    return key if isinstance(key, str) else dump(key)
