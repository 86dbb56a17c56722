"""Find the end of a value as it comes: JSON passes on as written, a Python literal is collected."""

import re
from collections.abc import Callable

from slipstream_gateway.parsing.reader import Reader, Step

_PLAIN = re.compile(r"[\s0-9A-Za-z.,:+\-]*")  # of JSON outside texts and brackets
_SCALAR = re.compile(r"[0-9A-Za-z.+\-]*")
_CHARACTERS = re.compile(r'[^"\\\ud800-\udfff]*')  # of a text, up to what needs a look
_CONTROLS = re.compile(r"[\x00-\x1f]")
_CLOSER = {"{": "}", "[": "]", "(": ")"}
MAX_DEPTH = 64
"""Levels of a Python literal: deeper ones are texts."""


def json_value(reader: Reader, sink: Callable[[str], object]) -> Step[bool]:
    """Pass on one JSON value as it comes; return whether it is whole.

    It ends before the first character that no JSON has at its place as far as brackets tell, such
    as a marker outside a text. Control characters in a text, which JSON forbids, are escaped.
    """
    first = yield from reader.peek()
    if first == '"':
        return (yield from _text(reader, sink))
    if first not in ("{", "["):
        scalar = yield from reader.run(_SCALAR, 64)
        sink(scalar)
        return bool(scalar)
    closers: list[str] = []
    while True:
        buffer, at = reader.window()
        found = _PLAIN.match(buffer, at)
        assert found is not None
        if found.end() > at:
            sink(reader.take(found.end()))
        char = yield from reader.peek()
        if not char:
            return False
        if char == '"':
            if not (yield from _text(reader, sink)):
                return False
            continue
        if char in ("{", "["):
            closers.append(_CLOSER[char])
        elif char == closers[-1]:
            closers.pop()
        elif _PLAIN.fullmatch(char):
            continue  # it came with the next piece
        else:
            return False
        reader.skip(1)
        sink(char)
        if not closers:
            return True


def _text(reader: Reader, sink: Callable[[str], object]) -> Step[bool]:
    """Pass on a text in double quotes, which is next."""
    reader.skip(1)
    sink('"')
    while True:
        buffer, at = reader.window()
        found = _CHARACTERS.match(buffer, at)
        assert found is not None
        if found.end() > at:
            sink(_CONTROLS.sub(_escaped, reader.take(found.end())))
        char = yield from reader.peek()
        if char == '"':
            reader.skip(1)
            sink('"')
            return True
        if char == "\\":
            reader.skip(1)
            after = yield from reader.peek()
            if not after or "\ud800" <= after <= "\udfff":
                sink("\\")
                return False
            reader.skip(1)
            sink(_CONTROLS.sub(_escaped, after) if after < " " else "\\" + after)
        elif not char or "\ud800" <= char <= "\udfff":
            return False


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


_PYTHON = re.compile(r"[^\"'\\(){}\[\],\ud800-\udfff]*")
_QUOTED = {quote: re.compile(rf"[^{quote}\\\ud800-\udfff]*") for quote in "\"'"}


def python_value(reader: Reader) -> Step[tuple[str, bool]]:
    """Return the text of a Python literal, up to a comma or closing bracket, which is next.

    The second value is whether it ends there, and has at most `MAX_DEPTH` levels.
    """
    pieces: list[str] = []
    closers: list[str] = []
    deepest = 0
    while True:
        buffer, at = reader.window()
        found = _PYTHON.match(buffer, at)
        assert found is not None
        pieces.append(reader.take(found.end()))
        char = yield from reader.peek()
        if not closers and char in (",", ")", "]", "}"):
            return "".join(pieces).strip(), deepest <= MAX_DEPTH
        if char in _QUOTED:
            if not (yield from _quoted(reader, char, pieces)):
                return "".join(pieces), False
            continue
        if not char or char == "\\" or "\ud800" <= char <= "\udfff":
            return "".join(pieces), False
        if char in _CLOSER:
            closers.append(_CLOSER[char])
            deepest = max(deepest, len(closers))
        elif char in (")", "]", "}") and closers.pop() != char:
            return "".join(pieces), False
        elif _PYTHON.fullmatch(char):
            continue
        reader.skip(1)
        pieces.append(char)


def _quoted(reader: Reader, quote: str, pieces: list[str]) -> Step[bool]:
    reader.skip(1)
    pieces.append(quote)
    while True:
        buffer, at = reader.window()
        found = _QUOTED[quote].match(buffer, at)
        assert found is not None
        pieces.append(reader.take(found.end()))
        char = yield from reader.peek()
        if char == "\\":
            reader.skip(1)
            char += yield from reader.peek()
            if len(char) == 1:
                pieces.append(char)
                return False
            reader.skip(1)
            pieces.append(char)
        elif char == quote:
            reader.skip(1)
            pieces.append(quote)
            return True
        elif not char or "\ud800" <= char <= "\udfff":
            return False
