"""The four styles of a call's body. A reader stands behind the opening; a writer takes the call.

What was read and is no call stays in the reader's record, which the caller sends as text.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

from slipstream_gateway.parsing.format import Calls, Envelope, Header, Pythonic, Tags
from slipstream_gateway.parsing.reader import Reader, Step, Stops
from slipstream_gateway.parsing.scan import json_value, python_value
from slipstream_gateway.parsing.values import (
    NotJsonError,
    dump,
    literal_to_json,
    read_json,
    to_json,
    types_of,
)

MAX_HEAD = 512
"""Characters of a head, a name or a key: a longer one is text."""

_TAG_NAME = re.compile(r"[^\s<>\"'\ud800-\udfff]{1,256}")
_PYTHON_NAME = re.compile(r"[\w.\-]*")
_IDENTIFIER = re.compile(r"\w*")


class Writer(Protocol):
    """Where calls go."""

    @property
    def needs_all(self) -> bool:
        """Whether only a tool's name with its arguments is a call."""

    def is_call(self, name: str) -> bool:
        """Return whether a name can be that of a call."""

    def schema(self, name: str) -> Any:
        """Return the schema of a tool's arguments."""

    def start(self, name: str, call_id: str | None = None) -> None:
        """Start a call."""

    def write(self, fragment: str) -> None:
        """Add to its arguments."""


class Body:
    """What the styles look for in a format's bodies, compiled once."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        style, around = calls.style, (calls.open, calls.close, calls.section_close)
        if isinstance(style, Header):
            pattern = style.pattern
            for number, marker in enumerate(style.markers):
                pattern = pattern.replace(f"@{number}", re.escape(marker))
            self.head_pattern = re.compile(pattern)
            self.head_stops = Stops(["{", *around])
        elif isinstance(style, Tags):
            self.head_stops = Stops([*style.name_ends, calls.close])
            self.key_stops = Stops(style.key_ends)
            self.value_stops = Stops([style.value_close])


# --- a JSON object with name and arguments -------------------------------------------------------


def envelopes(reader: Reader, body: Body, writer: Writer, is_list: bool) -> Step[None]:
    """Read objects with name and arguments, one after another."""
    style = body.calls.style
    keys = style.argument_keys if isinstance(style, Envelope) else Envelope().argument_keys
    separators = style.separator if isinstance(style, Envelope) else ""
    if is_list:
        separators = ","
        yield from reader.spaces()
        if not (yield from reader.literal("[")):
            return
    while True:
        if (yield from reader.spaces()) != "{":
            return
        if not (yield from _envelope(reader, keys, writer)):
            return
        after = yield from reader.spaces()
        if is_list and after == "]":
            reader.skip(1)
            return
        if not after or after not in separators:
            return
        reader.record()
        reader.skip(1)


def _envelope(reader: Reader, keys: tuple[str, ...], writer: Writer) -> Step[bool]:
    """Read an object; return whether it was a call, and whole."""
    name: str | None = None
    call_id: str | None = None
    arguments: list[str] | None = None  # those that came before the name
    has_started = False
    reader.skip(1)
    while True:
        char = yield from reader.spaces()
        if char == "}":
            break
        if char == ",":
            reader.skip(1)
            continue
        key = yield from _key(reader)
        if key is None:
            return False
        if key in keys and not has_started and arguments is None:
            is_object = (yield from reader.peek()) == "{"
            if is_object and name is not None:
                writer.start(name, call_id)
                has_started = True
                if not (yield from json_value(reader, writer.write)):
                    return False
            else:
                arguments = []
                if not (yield from json_value(reader, arguments.append)):
                    return False
                if not is_object and not _unpack(arguments):
                    return False
        else:
            is_value, value = yield from _collected(reader)
            if not is_value or (key == "name" and not _is_name(value, writer)):
                return False
            if key == "name" and not has_started:
                name = value
            elif key == "id" and not has_started and isinstance(value, str) and value:
                call_id = value
            elif writer.needs_all and not has_started and key not in ("type", "id"):
                return False
        if name is not None and arguments is not None and not has_started:
            writer.start(name, call_id)
            has_started = True
            writer.write("".join(arguments))
    if not has_started:
        if name is None or writer.needs_all:
            return False
        writer.start(name, call_id)
        writer.write("{}")
    reader.skip(1)
    return True


def _key(reader: Reader) -> Step[str | None]:
    """Read a key and its colon; None if there is none."""
    pieces: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from json_value(reader, pieces.append)):
        return None
    if (yield from reader.spaces()) != ":":
        return None
    reader.skip(1)
    yield from reader.spaces()
    try:
        key = read_json("".join(pieces))
    except NotJsonError:
        return None
    return str(key)


def _collected(reader: Reader) -> Step[tuple[bool, Any]]:
    """Return whether a JSON value is next, and the value."""
    pieces: list[str] = []
    if not (yield from json_value(reader, pieces.append)):
        return False, None
    try:
        return True, read_json("".join(pieces))
    except NotJsonError:
        return False, None


def _is_name(value: object, writer: Writer) -> bool:
    return isinstance(value, str) and bool(value) and writer.is_call(value)


def _unpack(arguments: list[str]) -> bool:
    """Take arguments that are null or a text of JSON; return whether they are an object."""
    try:
        value = read_json("".join(arguments))
        if isinstance(value, str):
            value = read_json(value)
    except NotJsonError:
        return False
    if value is not None and not isinstance(value, dict):
        return False
    arguments[:] = [dump(value or {})]
    return True


# --- a head, then JSON ---------------------------------------------------------------------------


def headed(reader: Reader, body: Body, writer: Writer) -> Step[None]:
    """Read a head with the name, then the arguments."""
    style = body.calls.style
    assert isinstance(style, Header)
    if style.can_list and (yield from reader.spaces()) == "[":
        yield from envelopes(reader, body, writer, True)
        return
    head = yield from reader.head(body.head_stops, MAX_HEAD)
    if head is None or not head[1]:
        return
    found = body.head_pattern.fullmatch(head[0])
    if found is None:
        return
    groups = found.groupdict()
    writer.start(groups["name"], groups.get("id"))
    if head[1] != "{":
        writer.write("{}")
        return
    yield from json_value(reader, writer.write)
    if style.fence:
        yield from reader.spaces()
        yield from reader.literal(style.fence)


# --- tags ----------------------------------------------------------------------------------------


def tagged(reader: Reader, body: Body, writer: Writer) -> Step[None]:
    """Read a name, then each argument between tags."""
    style = body.calls.style
    assert isinstance(style, Tags)
    head = yield from reader.head(body.head_stops, MAX_HEAD)
    if head is None or not head[1]:
        return
    name, stop = head[0].strip(), head[1]
    if _TAG_NAME.fullmatch(name) is None:
        return
    if stop not in (style.key_open, body.calls.close):
        reader.skip(len(stop))
    writer.start(name)
    schema = writer.schema(name)
    before = "{"
    while True:
        yield from reader.spaces()
        reader.record()
        found = yield from _tag_key(reader, body, style)
        if found is None:
            break
        reader.recorded()
        key, kind = found
        types = frozenset({kind}) if kind else _types(schema, key)
        writer.write(f"{before}{dump(key)}: ")
        if not (yield from _tag_value(reader, body, style, types, kind != "", writer)):
            return
        before = ", "
    writer.write("{}" if before == "{" else "}")


def _tag_key(reader: Reader, body: Body, style: Tags) -> Step[tuple[str, str | None] | None]:
    """Read up to a value; return its key and the type that the tag declares."""
    if not (yield from reader.literal(style.key_open)):
        return None
    head = yield from reader.head(body.key_stops, MAX_HEAD)
    if head is None or not head[1]:
        return None
    reader.skip(len(head[1]))
    if style.value_open:
        yield from reader.spaces()
        if not (yield from reader.literal(style.value_open)):
            return None
    return head[0].strip(), style.key_ends[head[1]]


def _types(schema: Any, key: str) -> frozenset[str]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return frozenset()
    return types_of(properties.get(key), schema)


class _Lines:
    """A text without one newline at either end, as it comes."""

    def __init__(self, sink: Callable[[str], object], is_trimmed: bool) -> None:
        self._sink = sink
        self._is_trimmed = is_trimmed
        self._at_start = is_trimmed
        self._held = ""

    def write(self, text: str) -> None:
        """Add text."""
        text = _SPECIAL.sub("", text)
        if self._at_start and text:
            text, self._at_start = text.removeprefix("\n"), False
        if not self._is_trimmed or not text:
            self._sink(text)
            return
        ends = text.endswith("\n")
        self._sink(self._held + (text[:-1] if ends else text))
        self._held = "\n" if ends else ""

    def cut(self) -> None:
        """Send what is held: no end came."""
        self._sink(self._held)


_SPECIAL = re.compile("[\ud800-\udfff]")


def _tag_value(
    reader: Reader,
    body: Body,
    style: Tags,
    types: frozenset[str],
    may_be_text: bool,
    writer: Writer,
) -> Step[bool]:
    """Read a value and its end; return whether the end came.

    A text is written as it comes. In a declared object or array the end may stand within a text.
    """
    pieces: list[str] = []
    is_text = may_be_text and types == {"string"}
    sink = (lambda text: writer.write(dump(text)[1:-1])) if is_text else pieces.append
    lines = _Lines(sink, style.has_newlines)
    if is_text:
        writer.write('"')
    elif types and "string" not in types:
        reader.record()
        first = yield from reader.spaces()
        lines.write(reader.recorded())
        if first in ("{", "["):
            yield from json_value(reader, pieces.append)
    stop = yield from reader.upto(body.value_stops, lines.write)
    if not stop:  # the answer is cut: what is there, without an end
        lines.cut()
        writer.write("" if is_text else dump("".join(pieces))[:-1])
        return False
    reader.skip(len(stop))
    types = types if may_be_text else types - {"string"}
    writer.write('"' if is_text else to_json("".join(pieces), types))
    return True


# --- Python --------------------------------------------------------------------------------------


def pythonic(reader: Reader, body: Body, writer: Writer) -> Step[None]:
    """Read calls as Python writes them."""
    style = body.calls.style
    assert isinstance(style, Pythonic)
    yield from reader.spaces()
    if style.is_list and not (yield from reader.literal("[")):
        return
    while True:
        yield from reader.spaces()
        if not (yield from _python_call(reader, writer)):
            return
        after = yield from reader.spaces()
        if after == "]" and style.is_list:
            reader.skip(1)
            return
        reader.record()
        if after == "," and style.is_list:
            reader.skip(1)
        elif style.is_list or not after:
            return


def _python_call(reader: Reader, writer: Writer) -> Step[bool]:
    """Read `f(a=1)`; return whether it was a call, and whole."""
    name = yield from reader.run(_PYTHON_NAME, 256)
    if not name or name[0].isdigit() or not writer.is_call(name):
        return False
    if not (yield from reader.literal("(")):
        return False
    before = "{"
    while (yield from reader.spaces()) != ")":
        key = yield from reader.run(_IDENTIFIER, 256)
        yield from reader.spaces()
        if not key or not (yield from reader.literal("=")):
            if before != "{":
                writer.write("}")
            return False
        if before == "{":
            writer.start(name)
        value, is_whole = yield from python_value(reader)
        writer.write(f"{before}{dump(key)}: ")
        if not is_whole:
            writer.write(dump(value)[:-1])
            return False
        writer.write(literal_to_json(value))
        before = ", "
        if (yield from reader.spaces()) == ",":
            reader.skip(1)
    if before == "{":
        writer.start(name)
    reader.skip(1)
    writer.write("{}" if before == "{" else "}")
    return True
