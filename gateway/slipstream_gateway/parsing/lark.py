"""Write a grammar for the guides' library: rules in Lark, and JSON schemas as rules."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slipstream_contract.guide import Guide, GuideKind, GuideOptions

from slipstream_gateway.parsing.format import AddedTokens

TEXT = r"/(.|\n)*/"
"""Any text; a token that is in a vocabulary as a whole is in none, but stands for itself."""

EMPTY = '""'


class Lark:
    """A grammar while it is written. Expressions are texts; rules get names."""

    def __init__(self, added: AddedTokens, reads_letters: bool = False) -> None:
        """Start a grammar; `added` tokens are written as themselves wherever their text stands.

        With `reads_letters` the letters of a special token are that marker, too.
        """
        self._added = added
        self._reads_letters = reads_letters
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._schemas: dict[str, Any] = {}
        texts = sorted({*added.special, *added.visible}, key=len, reverse=True)
        self._token = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def guide(self, start: str) -> Guide:
        """Return the guide of a start expression."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        text = json.dumps({"lark": lark, "schemas": self._schemas}, ensure_ascii=False)
        return Guide(GuideKind.TOOLS, text, GuideOptions(in_thinking=True))

    def rule(self, expression: str, is_lazy: bool = False) -> str:
        """Return the name of a rule."""
        key = f"{is_lazy}{expression}"
        if key not in self._names:
            name = self._names[key] = f"part_{len(self._rules)}"
            self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {expression}")
        return self._names[key]

    def recursive(self, expression: Callable[[str], str]) -> str:
        """Return the name of a rule that its own expression names."""
        name = f"self_{len(self._rules)}"
        self._rules.append(f"{name}: {expression(name)}")
        return name

    def json(self, schema: Any) -> str:
        """Return the name of a rule for the JSON of a schema."""
        name = f"json_{len(self._schemas)}"
        self._schemas[name] = schema
        return name

    def say(self, text: str) -> str:
        """Return the expression of a text; empty for an empty one."""
        pieces = [piece for piece in self._token.split(text) if piece]
        return " ".join(self._piece(piece) for piece in pieces)

    def _piece(self, piece: str) -> str:
        token_id = self._added.get(piece)
        return quoted(piece) if token_id is None else f"<[{token_id}]>"

    def is_token(self, text: str) -> bool:
        """Return whether a text is a token of its own."""
        return self._added.get(text) is not None

    def until(self, marker: str, text: str = TEXT) -> str:
        """Return the expression of any text up to a marker, and the marker."""
        ways = []
        if (said := self.say(marker)) != quoted(marker):
            ways.append(f"{self.rule(text)} {said}")
        if self._reads_letters or marker not in self._added.special:  # else letters are no marker
            ways.append(self.rule(f"{text} {quoted(marker)}", is_lazy=True))
        return self.rule(" | ".join(ways))

    def joined(self, parts: Iterable[str]) -> str:
        """Return the expression of parts one after another."""
        return " ".join(part for part in parts if part) or EMPTY

    def any_of(self, parts: Iterable[str]) -> str:
        """Return the name of a rule of alternatives."""
        return self.rule(" | ".join(parts))


def quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
