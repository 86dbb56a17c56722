"""Table of request fields: what each means, its bounds, its names, its place on the device.

The table stands in the structs themselves: an annotation of `SamplingParams`, or of another struct
of the contract, carries a `Field`. From it come the checks of the schemas and of the engine, the
page of limits, the options of the command and the device's record of how to sample a token. So a
new sampling parameter is one annotation here, and the kernel that obeys it.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_type_hints

import msgspec

from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip

SchemaName = Literal["trtllm", "vllm"]
MODEL, SERVER, ENGINE = "model", "server", "engine"
BOTH = f"{MODEL}, {ENGINE}"


class Bounds(NamedTuple):
    """Bounds of the values that are served; `least` itself is not served if it `is_open`."""

    least: float
    most: float
    is_open: bool = False

    def has(self, value: float) -> bool:
        """Return whether a value is served; NaN never is."""
        return (self.least < value if self.is_open else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        if self.is_open:
            return f"above {self.least:g} and at most {self.most:g}"
        return f"from {self.least} to {self.most}"

    def check(self, label: str, value: Any, kind: type) -> Any:
        """Return a value that is served. Raises ContractError naming field, value and bounds."""
        if kind is int:
            return limits.check_whole(label, value, int(self.least), int(self.most))
        if self.is_open and not self.has(value):
            raise ContractError(f"{label} is {limits.shown(value, self.has)}, not a number {self}")
        return limits.check_number(label, value, self.least, self.most)


class Row(NamedTuple):
    """A line of the page of limits; a bound in words is no constant."""

    field: str
    least: float | str
    most: float | str
    refused_by: str


class Asked(msgspec.Struct, frozen=True):
    """A field as one schema has it, where that differs from the field itself."""

    name: str = ""  # of the input or parameter; empty: the field's own
    default: float | None = None  # in the schema's meaning; None: the struct's
    bounds: Bounds | None = None  # None: those of the engine
    most: str = ""  # in words, where a request's other fields bound it
    refused_by: str = ""  # empty: the model, and the engine where its bound is the same


class Field(msgspec.Struct, frozen=True):
    """A line of the table. The kind of value, and its default, are the annotation's own."""

    help: str
    bounds: Bounds | None = None  # of the engine; None: it is no number
    trtllm: Asked | None = Asked()  # None: that schema reads it in its own way, or not at all
    vllm: Asked | None = Asked()
    device: str = ""  # its name in the device's record; empty: it is not there
    is_filter: bool = False  # leaves tokens out before sampling; greedy decoding needs none
    is_option: bool = False  # of the command
    rows: tuple[Row, ...] = ()  # of the page of limits, beside those of its numbers


class Entry(NamedTuple):
    """A field of a struct, with what stands beside its line."""

    name: str
    kind: type  # bool, int, float, or object for all else
    default: Any  # None where there is none
    is_optional: bool  # None is a value
    field: Field

    def asked(self, schema: SchemaName) -> Asked | None:
        """Return how a schema has it, with nothing left open; None: not as a plain value."""
        asked: Asked | None = getattr(self.field, schema)
        if asked is None or self.kind is object:
            return None
        return Asked(
            asked.name or self.name,
            self.default if asked.default is None else asked.default,
            asked.bounds or self.field.bounds,
            asked.most,
            asked.refused_by,
        )


class Source(Protocol):
    """Source of one request's values for a schema."""

    def label(self, name: str) -> str:
        """Return the name that errors give it."""

    def has(self, name: str) -> bool:
        """Return whether the request gives it."""

    def whole(self, name: str) -> int:
        """Return a whole number. Raises ContractError."""

    def number(self, name: str) -> float:
        """Return a number. Raises ContractError."""

    def flag(self, name: str) -> bool:
        """Return true or false. Raises ContractError."""


@cache
def table(struct: type[msgspec.Struct]) -> Mapping[str, Entry]:
    """Return the fields of a struct that are in the table, in its order."""
    hints = get_type_hints(struct, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    found = {}
    for name in dict.fromkeys((*struct.__annotations__, *hints)):  # what it inherits comes last
        hint = hints[name]
        notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Field)]
        if notes:
            plain = get_args(hint)[0]
            parts = get_args(plain) if isinstance(plain, UnionType) else (plain,)
            kinds = [kind for kind in (bool, int, float) if kind in parts]
            default = None if defaults[name] is msgspec.NODEFAULT else defaults[name]
            kind, is_optional = kinds[0] if kinds else object, NoneType in parts
            found[name] = Entry(name, kind, default, is_optional, notes[0])
    return found


def read_fields(
    struct: type[msgspec.Struct],
    schema: SchemaName,
    source: Source,
    names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return every plain value that a schema has for a struct, checked.

    `names`: a field's name -> the source's own. Raises ContractError.
    """
    values: dict[str, Any] = {}
    for entry, asked in _asked(struct, schema):
        name = names.get(asked.name, asked.name)
        is_required = asked.default is None and not entry.is_optional
        if is_required or source.has(name):
            values[entry.name] = _read(source, name, asked, entry.kind)
        else:
            values[entry.name] = asked.default
    return values


@cache
def _asked(struct: type[msgspec.Struct], schema: SchemaName) -> list[tuple[Entry, Asked]]:
    """Return what a schema reads; made once, as every request goes through it."""
    pairs = [(entry, entry.asked(schema)) for entry in table(struct).values()]
    return [(entry, asked) for entry, asked in pairs if asked is not None]


def _read(source: Source, name: str, asked: Asked, kind: type) -> Any:
    if kind is bool:
        return source.flag(name)
    assert asked.bounds is not None, f"{name} is a number without bounds"
    value = source.number(name) if kind is float else source.whole(name)
    return asked.bounds.check(source.label(name), value, kind)


def check_fields(values: msgspec.Struct) -> None:
    """Raise ContractError for a number that is out of the engine's bounds."""
    for entry in table(type(values)).values():
        bounds, value = entry.field.bounds, getattr(values, entry.name)
        if bounds is not None and value is not None and not bounds.has(value):
            raise ContractError(f"{entry.name} is {clip(value)}, not a number {bounds}")


def rows(struct: type[msgspec.Struct]) -> Iterator[Row]:
    """Return the lines of the page of limits."""
    for entry in table(struct).values():
        yield from _rows_of(entry)
        yield from entry.field.rows


def _rows_of(entry: Entry) -> Iterator[Row]:
    trtllm, vllm = entry.asked("trtllm"), entry.asked("vllm")
    shared = trtllm is not None and vllm is not None and trtllm.bounds == vllm.bounds
    for asked, suffix in ((trtllm, ""), (vllm, " of `vllm_model`")):
        if asked is None or asked.bounds is None or (shared and suffix):
            continue
        names = [asked.name, vllm.name] if shared and vllm is not None else [asked.name]
        label = ", ".join(f"`{name}`" for name in dict.fromkeys(names)) + suffix
        least, most, is_open = asked.bounds
        engine = entry.field.bounds
        refused_by = BOTH if engine is not None and engine.most == most else MODEL
        yield Row(
            label,
            f"above {_shown(least)}" if is_open else least,
            asked.most or most,
            asked.refused_by or refused_by,
        )


def markdown(lines: Iterable[Row]) -> str:
    """Return the page's table."""
    text = ["| field | from | to | refused by |", "|---|---|---|---|"]
    for field, least, most, place in lines:
        text.append(f"| {field} | {_shown(least)} | {_shown(most)} | {place} |")
    return "\n".join(text)


def _shown(bound: float | str) -> str:
    if isinstance(bound, str):
        return bound
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
