"""Say in a grammar what an expression of a `response_template` matches.

What is written is one way among those that the expression matches: blanks where it lets them be,
a group's text where it is known, else the shortest. Each piece has an example, so that a whole call
can be made and read before its grammar is served.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream_gateway.parsing.lark import Lark

_parse: Callable[[str, int], Any] = re._parser.parse  # type: ignore[attr-defined]
_MOST_BLANKS = 8
_DIGIT, _WORD, _BLANK = "/[0-9]/", "/[0-9a-z]/", r"/[ \t\r\n]/"


class UnsayableError(ValueError):
    """An expression of which no text can be made; its text says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an expression.

    Attributes:
        text: what is written; None: a group's text, or any that `expression` has.
        expression: of the grammar, where `text` is None and no group is named.
        example: a text that it has.
        group: the name of the group whose text it is.
    """

    text: str | None = None
    expression: str = ""
    example: str = ""
    group: str = ""


def pieces_of(pattern: str, groups: frozenset[str]) -> list[list[Piece]]:
    """Return the ways to write what an expression matches. Raises UnsayableError.

    Args:
        pattern: of the library `regex`; what Python's `re` has not cannot be said.
        groups: the names of those groups whose texts will be given.
    """
    try:
        tree = _parse(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsayableError(str(error)) from None
    names = {number: name for name, number in tree.state.groupdict.items() if name in groups}
    return [_merged(way) for way in _ways(list(tree), names)]


def literal(text: str) -> list[Piece]:
    """Return the pieces of a text."""
    return [Piece(text=text, example=text)] if text else []


def said(lark: Lark, pieces: list[Piece], texts: Mapping[str, str]) -> tuple[str, str]:
    """Return the expression of pieces, and an example, with the texts of their groups."""
    expressions, examples = [], []
    for piece in _merged([_filled(piece, texts) for piece in pieces]):
        expressions.append(piece.expression if piece.text is None else lark.say(piece.text))
        examples.append(piece.example)
    return " ".join(each for each in expressions if each), "".join(examples)


def _filled(piece: Piece, texts: Mapping[str, str]) -> Piece:
    return Piece(text=texts[piece.group], example=texts[piece.group]) if piece.group else piece


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Return pieces of which no two texts stand side by side: markers may lie across."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.text is not None and found[-1].text is not None:
            found[-1:] = literal(found[-1].text + piece.text)
        elif piece.text != "":
            found.append(piece)
    return found


def _ways(tree: list[Any], names: Mapping[int, str]) -> list[list[Piece]]:
    ways: list[list[Piece]] = [[]]
    for operation, argument in tree:
        ends = list(_node(str(operation), argument, names))
        ways = [way + end for way in ways for end in ends]
        if len(ways) > 16:
            raise UnsayableError("more than 16 ways to write it")
    return ways


def _node(operation: str, argument: Any, names: Mapping[int, str]) -> Iterator[list[Piece]]:
    """Return the ways of one node of the parsed expression."""
    if operation == "LITERAL":
        yield literal(chr(argument))
    elif operation == "SUBPATTERN":
        number, add, drop, inner = argument
        if add or drop:
            raise UnsayableError("flags within it")
        yield from [[Piece(group=names[number])]] if number in names else _ways(inner, names)
    elif operation == "BRANCH":
        inner = [list(each) for each in argument[1]]
        ends = [each for each in inner if [str(name) for name, _ in each] != ["AT"]]
        for each in ends or inner:
            yield from _ways(each, names)
    elif operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        yield from _repeated(argument, names)
    elif operation == "AT" and str(argument) in ("AT_END", "AT_END_STRING"):
        yield []
    else:
        yield [_character(operation, argument)]


def _repeated(argument: Any, names: Mapping[int, str]) -> Iterator[list[Piece]]:
    least, most, inner = argument
    tree = list(inner)
    operation, value = tree[0] if len(tree) == 1 else ("", None)
    if str(operation) in ("IN", "CATEGORY") and _kind(str(operation), value) == _BLANK:
        bound = min(int(most), max(least, _MOST_BLANKS))
        blanks = f"{_BLANK[:-1]}{{{max(least, 1)},{bound}}}/"
        expression = blanks if least else f"({blanks})?"
        yield [Piece(expression=expression, example=" " * least)]
        return
    if least > 64:
        raise UnsayableError(f"{least} repetitions")
    yield from _ways(tree * least, names)


def _character(operation: str, argument: Any) -> Piece:
    kind = _kind(operation, argument)
    if kind is None:
        raise UnsayableError(f"{operation.lower().replace('_', ' ')} in it")
    return Piece(expression=kind, example=" " if kind == _BLANK else "0")


def _kind(operation: str, argument: Any) -> str | None:
    """Return the expression of a set of characters; None: not known."""
    if operation == "ANY":
        return _WORD
    if operation == "CATEGORY":
        argument, operation = [(operation, argument)], "IN"
    if operation != "IN":
        return None
    kinds = [str(value) for name, value in argument if str(name) == "CATEGORY"]
    for category, expression in (
        ("CATEGORY_WORD", _WORD),
        ("CATEGORY_DIGIT", _DIGIT),
        ("CATEGORY_SPACE", _BLANK),
    ):
        if category in kinds and str(argument[0][0]) != "NEGATE":
            return expression
    ranges = [value for name, value in argument if str(name) == "RANGE"]
    return _DIGIT if (ord("0"), ord("9")) in ranges and str(argument[0][0]) != "NEGATE" else None
