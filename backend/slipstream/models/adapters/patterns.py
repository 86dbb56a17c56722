"""Patterns by which an adapter's configuration names modules: regexes whose search is bounded.

Python's search goes back over what it tried and holds the interpreter meanwhile, so that a pattern
such as `(a+)+b` would stop all streams for hours. A pattern is taken if the ways in which it can
match a name, by which the search is bounded, are few.
"""

import re
from typing import Any

MAX_NAME = 256  # characters of a module
_MAX_PATTERN = 512  # characters
_MAX_WAYS = 1 << 17  # a search of some milliseconds

_PLAIN = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class Whole:
    """A regex of modules' whole names."""

    def __init__(self, text: str) -> None:
        """Compile it. Raises `ValueError`, which says why not."""
        self._compiled = _compiled(text, text)

    def matches(self, module: str) -> bool:
        """Return whether a module is meant. A name has at most `MAX_NAME` characters."""
        assert len(module) <= MAX_NAME, "checked"
        return self._compiled.fullmatch(module) is not None


class Pattern:
    """A regex of modules' names, which matches whole parts of them at their end, as PEFT's do."""

    def __init__(self, text: str) -> None:
        """Compile it. Raises `ValueError`, which says why not."""
        self._compiled = _compiled(text, rf"(.*\.)?({text})$")

    def matches(self, module: str) -> bool:
        """Return whether a module is meant. A name has at most `MAX_NAME` characters."""
        assert len(module) <= MAX_NAME, "checked"
        return self._compiled.match(module) is not None


def _compiled(text: str, whole: str) -> re.Pattern[str]:
    """Compile what has a given regex in it. Raises `ValueError`."""
    if len(text) > _MAX_PATTERN:
        raise ValueError(f"a pattern of {len(text)} characters, at most {_MAX_PATTERN} are")
    try:
        # What `re.compile` reads a pattern by; it has no public name.
        parsed = re._parser.parse(text)  # type: ignore[attr-defined]
        compiled = re.compile(whole)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regex: {error}") from None
    ways = _ways_of(parsed)
    if ways is None:
        raise ValueError("a regex with references or conditions: not implemented")
    if ways > _MAX_WAYS:
        raise ValueError(
            f"a regex that may match a name in {ways if ways < 1 << 62 else 'countless'} ways, "
            f"at most {_MAX_WAYS} are served"
        )
    return compiled


def _ways_of(parsed: Any) -> int | None:
    """Count in how many ways a parsed regex matches a name at most; None: it looks elsewhere."""
    ways = 1
    for kind, given in parsed:
        found = _ways(str(kind), given)
        if found is None:
            return None
        ways *= found
    return ways


def _ways(kind: str, given: Any) -> int | None:
    if kind in _PLAIN:
        return 1
    if kind == "SUBPATTERN":
        return _ways_of(given[-1])
    if kind == "ATOMIC_GROUP":
        return _ways_of(given)
    if kind == "BRANCH":
        branches = [_ways_of(each) for each in given[1]]
        return None if None in branches else sum(filter(None, branches))
    if kind not in _REPEATS:
        return None
    least, most, body = given
    of_body, most = _ways_of(body), min(int(most), MAX_NAME)
    if of_body is None:
        return None
    times = max(1, most - min(int(least), MAX_NAME) + 1)
    # Bodies of one way and one length, as a class of characters has, differ by their count alone.
    is_single = of_body == 1 and body.getwidth()[0] == body.getwidth()[1] > 0
    return times if is_single else times * max(2, of_body) ** min(most, 64)
