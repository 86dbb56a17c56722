"""Fields of request bodies, as tables: each is served, without effect, or refused, and why.

A table is the one place that knows what an endpoint does with a field: `check` refuses by it, the
OpenAPI file (`schema`) and the tables of the documents (`markdown`) are made from it.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from slipstream_contract.errors import ContractError, clip

from slipstream_gateway.errors import ApiError

_SHOWN = 80  # characters of a value, or of an unknown name, in a message


class Use(StrEnum):
    """The way in which a field counts."""

    SERVED = "served"
    HARMLESS = "no effect"  # and none that a client could miss
    REFUSED = "refused"  # unless it has a neutral value


class Field(msgspec.Struct, frozen=True):
    """A field of a body.

    Attributes:
        help: what it does, or why not; for documents and refusals.
        kind: what `msgspec.convert` checks the value against; `Any`: what reads it checks it.
        schema: JSON schema of its values; empty: that of `kind`.
        neutral: of a refused one, values that ask for nothing, or for what happens anyway.
        is_required: whether null, or no field at all, is an error.
        members: of an object, those that are read; any other has no effect. Empty: all are.
        at: the endpoints that have it, where a table is of several.
    """

    name: str
    help: str
    kind: Any = Any
    schema: Mapping[str, Any] = {}
    use: Use = Use.SERVED
    neutral: tuple[object, ...] = ()
    is_required: bool = False
    members: tuple[str, ...] = ()
    at: str = ""

    def check(self, value: Any) -> None:
        """Refuse a value that is not null. Raises ApiError 400."""
        if self.use is not Use.REFUSED:
            convert(self.name, value, self.kind)
        elif not any(_is_same(value, each) for each in self.neutral):
            message = f"{self.name} is {shown(value)}, which is not served: {self.help}"
            code = "unsupported_value" if self.neutral else "unsupported_parameter"
            raise ApiError(400, message, self.name, code)

    def ignored(self, value: Any) -> list[str]:
        """Return what of a value has no effect: the field, or members of an object."""
        if self.use is Use.HARMLESS:
            return [self.name]
        if not (self.members and isinstance(value, dict)):
            return []
        return [f"{self.name}.{name}" for name in value if name not in self.members]

    def value_schema(self) -> dict[str, Any]:
        """Return the JSON schema of its values, null among them where it counts as no field."""
        if self.use is Use.REFUSED:
            return {"enum": [None, *self.neutral], "deprecated": True}
        found = dict(self.schema or msgspec.json.schema(self.kind))
        return found if self.is_required or not found else {"anyOf": [found, {"type": "null"}]}

    def mark(self) -> str:
        """Return what happens to it, in a word or two of the documents."""
        if self.use is not Use.REFUSED:
            return "required" if self.is_required else _WORKS[self.use]
        only = " or ".join(f"`{shown(value)}`" for value in self.neutral)
        return f"only {only}" if only else "400"


_WORKS = {Use.SERVED: "works", Use.HARMLESS: "no effect"}


class Table(dict[str, Field]):
    """The fields of an endpoint, by their names.

    Attributes:
        is_open: whether an unknown field has no effect, and is listed; else it is refused.
    """

    def __init__(self, fields: Iterable[Field], is_open: bool = False) -> None:
        super().__init__((field.name, field) for field in fields)
        self.is_open = is_open

    def check(self, body: Mapping[str, Any]) -> None:
        """Check every field of a body; null counts as no field.

        Raises:
            ApiError: 400 with `param`: an unknown or refused field, a wrong value, a missing field.
        """
        for name, value in body.items():
            field = self.get(name)
            if field is None and not self.is_open:
                raise ApiError(400, f"Unknown field `{name[:_SHOWN]}`", name, "unknown_parameter")
            if field is not None and value is not None:
                field.check(value)
        for name, field in self.items():
            if field.is_required and body.get(name) is None:
                message = f"Missing required field `{name}`"
                raise ApiError(400, message, name, "missing_required_parameter")

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return what of a checked body has no effect, for the response's header."""
        found: list[str] = []
        for name, value in body.items():
            field = self.get(name)
            if field is None:
                found.append(name)
            elif value is not None:
                found += field.ignored(value)
        return found

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a body, for the OpenAPI file."""
        found = {
            "type": "object",
            "properties": {
                name: {**field.value_schema(), "description": f"{field.use}: {field.help}"}
                for name, field in self.items()
            },
            "required": [name for name, field in self.items() if field.is_required],
        }
        return found if self.is_open else {**found, "additionalProperties": False}

    def markdown(self) -> str:
        """Return a table of a document: field, what happens to it, and how."""
        lines = ["| field | | what it does, or why not |", "|---|---|---|"]
        lines += [f"| `{name}` | {field.mark()} | {field.help} |" for name, field in self.items()]
        return "\n".join(lines) + "\n"


def convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value as `kind`. Raises ApiError 400 with the path of what is wrong in it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        where = name + path.rstrip("`")
        raise ApiError(
            400, f"`{where}`: {problem}; got {shown(value)}", where, "invalid_value"
        ) from None


def shown(value: Any) -> str:
    """Return a value as JSON, cut to what a message has room for."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_same(value: Any, other: object) -> bool:
    """Return whether two values of JSON are the same; 0 is not false."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def read_flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return true or false; a null is the default. Raises ContractError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ContractError(f"{name} is {clip(value)}, neither true nor false")
    return value


def read_text(body: Mapping[str, Any], name: str, allowed: Collection[str] = ()) -> str | None:
    """Return a text, one of those `allowed` if there are any; None without it.

    Raises ContractError.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or (allowed and value not in allowed):
        wanted = f"one of {', '.join(allowed)}" if allowed else "a text"
        raise ContractError(f"{name} is {clip(value)}, not {wanted}")
    return value


def read_whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Return a whole number within bounds; None without it. Raises ContractError."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ContractError(f"{name} is {clip(value)}, not a whole number from {low} to {high}")
    return value


def read_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object, empty without it. Raises ContractError."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ContractError(f"{name} is {clip(value)}, not an object")
    return value
