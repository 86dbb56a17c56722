"""Read the JSON object that a cut answer has begun."""

from typing import Any

import msgspec

_CLOSERS = {"{": "}", "[": "]"}


def partial_object(text: str) -> dict[str, Any]:
    """Return the members of a JSON object which are there, where its text may be cut anywhere.

    A string or a word that is cut is left out, with its key. What is no object gives {}.
    """
    for end, closers in _cuts(text):
        try:
            value = msgspec.json.decode(text[:end] + closers)
        except msgspec.DecodeError:
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _cuts(text: str) -> list[tuple[int, str]]:
    """Return places where the text may be valid with the brackets closed, the last first."""
    cuts: list[tuple[int, str]] = []
    closers = ""
    is_string = is_escaped = False
    for place, char in enumerate(text):
        if is_string:
            is_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_string = True
        elif char in _CLOSERS:
            closers = _CLOSERS[char] + closers
            cuts.append((place + 1, closers))
        elif char == ",":
            cuts.append((place, closers))
        elif char in "}]":
            closers = closers[1:]
    cuts.append((len(text), closers))
    return cuts[::-1]
