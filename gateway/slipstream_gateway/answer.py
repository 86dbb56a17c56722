"""The answer that every dialect writes: deltas as they come, and their sum."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """New text of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """New text of the reasoning before, or between parts of, the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The start of a tool call: its number in this answer, its id and the function's name."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A fragment of a call's arguments; joined, they are the JSON text of an object.

    No other delta comes between a call's start and its last fragment. A cut answer cuts them.
    """

    index: int
    fragment: str


Delta = Text | Reasoning | CallStart | CallArguments


class Call(msgspec.Struct):
    """A whole tool call."""

    id: str
    name: str
    arguments: str = ""  # JSON


class TokenLogProb(msgspec.Struct, frozen=True):
    """A token with its log prob, and the most likely tokens at its place."""

    token_id: int
    text: str  # U+FFFD where its bytes are no text
    data: bytes
    log_prob: float
    top: tuple["TokenLogProb", ...] = ()  # by falling log prob, without tops of their own


class Finish(msgspec.Struct, frozen=True):
    """The end of an answer: `stop`, `length`, `tool_calls` or `abort`."""

    reason: str
    stop_reason: int | str | None = None  # the stop token id or stop word that matched


class Usage(msgspec.Struct):
    """Counts of tokens of a request, all its answers together."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # of the prompt, found in the cache
    reasoning: int = 0  # of the completion
    drafted: int = 0
    accepted: int = 0  # of the drafts


class Answer(msgspec.Struct):
    """A whole answer: the sum of its deltas, so it equals what a stream's client joins.

    `parts` has text, reasoning and calls as they came, neighbours of one kind joined; `text`,
    `reasoning` and `calls` have the same by kind.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []
    log_probs: list[TokenLogProb] = []
    finish: Finish | None = None
    parts: list[Text | Reasoning | Call] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        """Add what is new, in time linear in it: a text that only a local has grows in place."""
        for delta in deltas:
            match delta:
                case Text():
                    text, self.text = self.text, ""
                    text += delta.text
                    self.text = text
                    self._extend(delta)
                case Reasoning():
                    text, self.reasoning = self.reasoning, ""
                    text += delta.text
                    self.reasoning = text
                    self._extend(delta)
                case CallStart():
                    assert delta.index == len(self.calls), "calls start in order"
                    call = Call(delta.id, delta.name)
                    self.calls.append(call)
                    self.parts.append(call)
                case CallArguments():
                    assert delta.index == len(self.calls) - 1, "one call at a time"
                    assert self.parts[-1] is self.calls[-1], "nothing comes between"
                    text, self.calls[-1].arguments = self.calls[-1].arguments, ""
                    text += delta.fragment
                    self.calls[-1].arguments = text

    def _extend(self, delta: Text | Reasoning) -> None:
        if delta.text and self.parts and type(last := self.parts[-1]) is type(delta):
            assert not isinstance(last, Call)
            text = last.text
            del last, self.parts[-1]
            text += delta.text
            self.parts.append(type(delta)(text))
        elif delta.text:
            self.parts.append(delta)


class Parser(Protocol):
    """Splits one answer as it comes. The same tokens give the same sum at any chunking."""

    def feed(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[Delta]:
        """Return what the new tokens add.

        `texts` has one entry a token: its text, empty where a character is incomplete and for a
        special token, which only its id tells.
        """

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end of the answer."""
