"""Tables of request fields. Each is mapped, harmless or refused; checks and documents read them.

A table is the one place that knows what a dialect does with a field: `check` refuses by it, the
OpenAPI file (`schema`) and the tables of the documents (`markdown`) are made from it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream_gateway.errors import ApiError

_SHOWN = 80  # characters of a refused value in a message


class Mapped(msgspec.Struct, frozen=True):
    """A field that has an effect.

    Attributes:
        type: what `msgspec.convert` checks the value against; `Any`: the dialect checks it.
        what: the effect, for the documents.
        required: whether null, or no field at all, is an error.
    """

    type: Any
    what: str
    required: bool = False


class Harmless(msgspec.Struct, frozen=True):
    """A field that is accepted and changes no token.

    Attributes:
        type: what `msgspec.convert` checks the value against.
        why: why it is no loss, for the documents.
        values: the only ones accepted, which mean what happens anyway; empty: any.
    """

    type: Any
    why: str
    values: tuple[Any, ...] = ()


class Refused(msgspec.Struct, frozen=True):
    """A known field that cannot be served; any value but null is an error. `why`: the reason."""

    why: str


Field = Mapped | Harmless | Refused
Table = Mapping[str, Field]


def check(table: Table, body: Mapping[str, Any]) -> None:
    """Check every field of a body against a table; null counts as no field.

    Raises:
        ApiError: 400 with `param`: an unknown or refused field, a wrong value, a missing field.
    """
    for name, value in body.items():
        if name not in table:
            raise ApiError(400, f"Unknown field `{name[:_SHOWN]}`", name, "unknown_parameter")
        if value is not None:
            _check_value(name, table[name], value)
    for name, field in table.items():
        if isinstance(field, Mapped) and field.required and body.get(name) is None:
            raise ApiError(
                400, f"Missing required field `{name}`", name, "missing_required_parameter"
            )


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


def _check_value(name: str, field: Field, value: Any) -> None:
    if isinstance(field, Refused):
        raise ApiError(
            400, f"`{name}` is not supported: {field.why}", name, "unsupported_parameter"
        )
    convert(name, value, field.type)
    if isinstance(field, Harmless) and field.values and value not in field.values:
        accepted = ", ".join(shown(each) for each in field.values)
        raise ApiError(
            400,
            f"`{name}`: only {accepted} is supported, as {field.why}; got {shown(value)}",
            name,
            "unsupported_value",
        )


def ignored(table: Table, body: Mapping[str, Any]) -> list[str]:
    """Return the fields of a body that have no effect, for the header of the response."""
    return [
        name
        for name, value in body.items()
        if value is not None and isinstance(field := table.get(name), Harmless) and not field.values
    ]


def schema(table: Table) -> dict[str, Any]:
    """Return the JSON schema of a body, for the OpenAPI file; refused fields are left out."""
    properties: dict[str, Any] = {}
    for name, field in table.items():
        if isinstance(field, Mapped):
            text, nullable = field.what, not field.required
        elif isinstance(field, Harmless):
            text, nullable = f"No effect: {field.why}", True
        else:
            continue
        one = msgspec.json.schema(field.type)
        if isinstance(field, Harmless) and field.values:
            one = {"enum": list(field.values)}
        if nullable and one:
            one = {"anyOf": [one, {"type": "null"}]}
        properties[name] = {**one, "description": text}
    required = [n for n, f in table.items() if isinstance(f, Mapped) and f.required]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def markdown(table: Table) -> str:
    """Return a table of a document: field, what happens to it, and how."""
    lines = ["| field | | what it does, or why not |", "|---|---|---|"]
    for name, field in table.items():
        match field:
            case Mapped():
                kind, text = "required" if field.required else "works", field.what
            case Harmless():
                only = " or ".join(f"`{shown(value)}`" for value in field.values)
                kind, text = f"only {only}" if only else "ignored", field.why
            case Refused():
                kind, text = "400", field.why
        lines.append(f"| `{name}` | {kind} | {text} |")
    return "\n".join(lines) + "\n"
