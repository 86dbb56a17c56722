"""Collect the deltas of an answer: blanks before a marker go, calls are numbered."""

import re
from collections.abc import Callable, Mapping

from slipstream_gateway.answer import (
    CallArguments,
    CallStart,
    Delta,
    Reasoning,
    Text,
)
from slipstream_gateway.parsing.reader import SPACES

_SPECIAL = re.compile("[\ud800-\udfff]")


class Sink:
    """Text on its way out. Blanks at its end wait, as they go where a marker follows."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._held: list[str] = []
        self.is_empty = True  # nothing came out so far
        self.is_after_call = False  # nothing but blanks since
        self.skips_newlines = False

    def write(self, text: str) -> None:
        """Add text; special tokens have none."""
        if not text.isascii():
            text = _SPECIAL.sub("", text)
        if self.skips_newlines:
            text = text.lstrip("\n")
            self.skips_newlines = not text
        body = text.rstrip(SPACES)
        if body:
            self.flush()
            self._emit(body)
            self.is_empty = self.is_after_call = False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def hold(self, text: str) -> None:
        """Add text that goes where a call follows."""
        self._held.append(text)

    def drop(self) -> None:
        """Let a marker follow: what is held goes."""
        self._held.clear()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            self._emit("".join(self._held))
            self._held.clear()


class Deltas:
    """The deltas since they were last taken."""

    def __init__(self, make_id: Callable[[str, int], str]) -> None:
        self._new: list[Delta] = []
        self._make_id = make_id
        self.num_calls = 0
        self._ids: set[str] = set()
        self.text = Sink(lambda text: self._new.append(Text(text)))
        self.reasoning = Sink(lambda text: self._new.append(Reasoning(text)))

    def start_call(self, name: str, call_id: str | None) -> None:
        """Start a call; without an id, or with another's, it gets one of its own."""
        index = self.num_calls
        self.num_calls += 1
        if not call_id or call_id in self._ids:
            call_id = self._make_id(name, index)
        while call_id in self._ids:
            call_id = f"{self._make_id(name, index)}_{len(self._ids)}"
        self._ids.add(call_id)
        self._new.append(CallStart(index, call_id, name))

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the last call."""
        if fragment:
            self._new.append(CallArguments(self.num_calls - 1, fragment))

    def take(self) -> list[Delta]:
        """Return what is new, neighbours of a kind joined."""
        new, self._new = self._new, []
        if len(new) < 2:
            return new
        result: list[Delta] = []
        pieces: list[str] = []
        for place, delta in enumerate(new):
            after = new[place + 1] if place + 1 < len(new) else None
            if isinstance(delta, CallStart):
                result.append(delta)
                continue
            pieces.append(delta.fragment if isinstance(delta, CallArguments) else delta.text)
            if type(after) is type(delta):  # a call's start stands between those of two calls
                continue
            joined = "".join(pieces)
            pieces.clear()
            if isinstance(delta, CallArguments):
                result.append(CallArguments(delta.index, joined))
            else:
                result.append(type(delta)(joined))
        return result


class Surfaces:
    """How markers stand in the text that is read: as written, or each as one character.

    A marker that is a special token has no text, and is known by its id alone. It becomes a lone
    surrogate, which no text has, so that the same letters written by other tokens are only text.
    """

    def __init__(self, markers: set[str], special_ids: Mapping[str, int]) -> None:
        special = sorted(marker for marker in markers if marker in special_ids)
        self._of_marker = {marker: chr(0xDC00 + i) for i, marker in enumerate(special)}
        self._of_id = {special_ids[marker]: (marker, s) for marker, s in self._of_marker.items()}
        self._written = {ord(surface): marker for marker, surface in self._of_marker.items()}

    def of(self, marker: str) -> str:
        """Return what stands for a marker."""
        return self._of_marker.get(marker, marker)

    def read(self, token_id: int, text: str) -> str:
        """Return what stands for a token; its own text may come with it or not."""
        found = self._of_id.get(token_id)
        return text if found is None else text.removesuffix(found[0]) + found[1]

    def written(self, text: str) -> str:
        """Return a text with its markers as they are written."""
        return text if text.isascii() else text.translate(self._written)
