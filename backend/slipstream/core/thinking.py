"""Know where a model's thinking ends: the tokens that mark it, and whether an output has them yet.

A model that thinks writes its thoughts first, then a marker, then its answer. Its output is
thinking from its first token to the end of the first marker:

    outputs   thought ... thought  </think>  answer ...
    end_of                                 ^ the number of outputs up to here; None before it

What this gives: `Thinking.marker`, the ids; `end_of`, where an output stops thinking; `next_of`,
the token that goes on with the marker; `find_thinking`, which reads all that from a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.tokenizer import load_tokenizer

DEFAULT_END = "</think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The end of thinking of one model: the text of the marker, and its token ids, at least one."""

    text: str
    marker: tuple[int, ...]
    opener: int | None = None  # the token that opens thinking: <think> for </think>

    def is_open(self, prompt: Sequence[int]) -> bool | None:
        """Return whether a prompt ends in thinking; None: it has neither opener nor marker."""
        ids = prompt[::-1]
        closed = _index(ids, self.marker[::-1])
        opened = None if self.opener is None else _index(ids, (self.opener,))
        if opened is None:
            return None if closed is None else False
        return closed is None or opened < closed

    def end_of(self, outputs: Sequence[int], start: int = 0) -> int | None:
        """Return how many outputs there are up to the end of the first marker; None: no marker.

        Args:
            outputs: all tokens of an output.
            start: number of outputs that are known not to hold a whole marker.
        """
        marker, size = self.marker, len(self.marker)
        for end in range(max(size, start + 1), len(outputs) + 1):
            if outputs[end - 1] == marker[-1] and tuple(outputs[end - size : end]) == marker:
                return end
        return None

    def next_of(self, outputs: Sequence[int]) -> int:
        """Return the token that goes on with the longest part of the marker that ends an output."""
        marker = self.marker
        for size in range(len(marker) - 1, 0, -1):
            if tuple(outputs[len(outputs) - size :]) == marker[:size]:
                return marker[size]
        return marker[0]


def find_thinking(checkpoint: Path, vocab: TokenBytes, text: str = "") -> Thinking | None:
    """Return a model's end of thinking; None: it has none.

    Args:
        checkpoint: the directory, with a `tokenizer.json`.
        vocab: its tokens.
        text: the marker. One that is no token of its own is the tokens that spell it. Empty:
            `</think>`, if that is a token.
    """
    token_id = _single(vocab, (text or DEFAULT_END).encode())
    if token_id is not None:
        marker = text or DEFAULT_END
        opener = _single(vocab, marker.replace("/", "", 1).encode()) if "/" in marker else None
        return Thinking(marker, (token_id,), opener)
    ids = load_tokenizer(checkpoint).encode(text, add_special_tokens=False).ids if text else []
    return Thinking(text, tuple(ids)) if ids else None


def _index(ids: Sequence[int], part: tuple[int, ...]) -> int | None:
    """Return where a part begins for the first time; None: nowhere."""
    place = -1
    while True:
        try:
            place = ids.index(part[0], place + 1)
        except ValueError:
            return None
        if tuple(ids[place : place + len(part)]) == part:
            return place


def _single(vocab: TokenBytes, data: bytes) -> int | None:
    """Return the token whose bytes these are; of several the last, which is an added one."""
    return next((i for i in reversed(range(vocab.size)) if vocab.raw(i) == data), None)


class ThinkingBudget:
    """The end of thinking that one sequence is made to come to, after so many outputs."""

    field = "thinking_token_budget"

    def __init__(self, thinking: Thinking, budget: int) -> None:
        self._thinking = thinking
        self._budget = budget
        self._num_read = 0  # outputs that are known not to hold the marker
        self._is_over = False

    def forced(self, outputs: Sequence[int], drafts: Sequence[int]) -> int | None:
        """Return the one token that may follow outputs and drafts; None: any."""
        thinking = self._thinking
        if not self._is_over:
            self._is_over = thinking.end_of(outputs, self._num_read) is not None
            self._num_read = len(outputs)
        if self._is_over or len(outputs) + len(drafts) < self._budget:
            return None
        last = [*outputs[max(0, len(outputs) - len(thinking.marker) + 1) :], *drafts]
        return thinking.next_of(last) if thinking.end_of(last) is None else None

    def fork(self) -> None:
        """Note that the next outputs may be others."""
        self._num_read, self._is_over = 0, False
