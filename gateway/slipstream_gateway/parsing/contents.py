"""Read the text of a `response_template`'s field of calls, and shape it as the template says."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import regex

from slipstream_gateway.parsing.values import NotJsonError, dump, read_json, to_json, types_of

Args = Mapping[str, Any]
PLACE = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
"""The place of a value in a `transform`."""

_OPEN, _CLOSE = "\x01", "\x02"  # around the number of a text that was taken out


def _text(text: str, args: Args) -> Any:
    return text.strip() if args.get("strip", True) else text


def _int(text: str, args: Args) -> int:
    return int(_text(text, args))


def _float(text: str, args: Args) -> float:
    value = float(_text(text, args))
    if math.isfinite(value):
        return value
    number = read_json(_text(text, args))  # which is no word such as `inf`
    if not isinstance(number, float):
        raise NotJsonError("no number")
    return number


def _bool(text: str, args: Args) -> bool:
    return _text(text, args).lower() in ("true", "1")


def _json(text: str, args: Args) -> Any:
    """Read JSON whose keys may be bare words and whose texts may stand between marks."""
    taken: list[str] = []
    work = text
    marks = args.get("string_delims") or []
    if marks and (_OPEN in text or _CLOSE in text):
        raise NotJsonError("control characters beside marked texts")

    def take(found: Any) -> str:
        taken.append(found[1])
        return f"{_OPEN}{len(taken) - 1}{_CLOSE}"

    for opening, close in marks:
        pattern = f"{regex.escape(opening)}(.*?){regex.escape(close)}"
        work = regex.sub(pattern, take, work, flags=regex.DOTALL)
    if args.get("unquoted_keys"):
        work = regex.sub(r"(?<=[{,])(\w+):", r'"\1":', work)
    if marks:
        work = regex.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda found: dump(taken[int(found[1])]), work)
    try:
        return read_json(work)
    except NotJsonError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _tags(text: str, args: Args) -> dict[str, Any]:
    """Read tags, each with a key and a value."""
    result: dict[str, Any] = {}
    for found in regex.finditer(args["tag_pattern"], text, flags=regex.DOTALL):
        groups = found.groupdict()
        key, value = groups["key"], _inner(groups.get("value") or "", args)
        if args.get("merge_duplicates") and key in result:
            before = result[key]
            value = [*(before if isinstance(before, list) else [before]), value]
        result[key] = value
    return result


def _lines(text: str, args: Args) -> dict[str, Any]:
    """Read lines, each with a key and a value."""
    separator = args.get("kv_sep", ":")
    pairs = (line.split(separator, 1) for line in text.split(args.get("line_sep", "\n")))
    found = ([_text(part, args) for part in pair] for pair in pairs if len(pair) == 2)
    return {key: _inner(value, args) for key, value in found}


def _inner(text: str, args: Args) -> Any:
    parser = args.get("value_parser")
    if parser is None:
        return text
    return CONTENTS[parser.get("name", "text")](text, parser.get("args") or {})


CONTENTS: dict[str, Callable[[str, Args], Any]] = {
    "text": _text,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
}
"""Kinds of content -> how they are read. Raise ValueError, LookupError, TypeError."""


def shaped(value: Any, captures: Mapping[str, str], transform: Any, is_each: bool) -> Any:
    """Return a value in the template's shape. Raises ValueError, LookupError, TypeError."""
    if transform is None:
        return value
    if not is_each:
        return _filled(transform, {**captures, "content": value})
    if not isinstance(value, list):
        raise ValueError("no list")
    return [_filled(transform, {**captures, **each}) for each in value]


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, Mapping):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    found = PLACE.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        value = value[key]
    return value


def calls_of(value: Any, schemas: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    """Return name, arguments as JSON and id of calls. Raises ValueError if it is none."""
    found = []
    for each in value if isinstance(value, list) else [value]:
        function = each.get("function", each) if isinstance(each, dict) else {}
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError("a call without a name")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = read_json(arguments or "{}")
        if not isinstance(arguments, dict | None):
            raise ValueError("arguments that are no object")
        schema, own = schemas.get(name), each.get("id")
        text = _written(arguments or {}, schema)
        found.append((name, text, own if isinstance(own, str) else None))
    return found


def _written(arguments: Mapping[str, Any], schema: Any) -> str:
    """Return arguments as JSON; texts get the type that the schema declares."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    pairs = []
    for key, value in arguments.items():
        types: frozenset[str] = frozenset()
        if isinstance(properties, dict) and isinstance(value, str):
            types = types_of(properties.get(key), schema)
        text = to_json(value, types) if types else dump(value)
        pairs.append(f"{dump(key)}: {text}")
    return f"{{{', '.join(pairs)}}}"
