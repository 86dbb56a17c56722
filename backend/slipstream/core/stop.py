"""When a sequence ends, and which of its tokens may leave before that is known.

Stop words are matched on bytes, because a tokenizer may cut a word anywhere, even inside a
character. All words of a request are one automaton (Aho and Corasick, 1975): one transition a byte,
however many words there are. Its depth is the length of the tail that may still become a stop word:

    ... bytes nobody can take back | depth bytes held back
                                   ^ a token that reaches past here waits
"""

from array import array
from collections import deque
from functools import lru_cache
from typing import NamedTuple, Protocol

from slipstream_contract.sampling import SamplingParams

from slipstream.wire import FinishReason


class RawBytes(Protocol):
    """What is asked of the vocabulary."""

    def raw(self, token_id: int) -> bytes:
        """The bytes of a token; a special token's are its text."""


class Ending(NamedTuple):
    """Why a sequence ended; `stop_reason` is the stop token id or the stop word."""

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class StopWords:
    """The automaton of a request's stop words. Immutable: all its sequences share it."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        self.words = words
        self.depth = array("H", [0])
        self._next: dict[int, int] = {}  # state << 8 | byte -> state
        self._fallback = array("I", [0])
        self._match = array("i", [-1])  # the longest word that ends here, as its number
        for number, word in enumerate(words):
            self._insert(number, word)
        self._link()

    def _insert(self, number: int, word: bytes) -> None:
        state = 0
        for byte in word:
            child = self._next.setdefault(state << 8 | byte, len(self.depth))
            if child == len(self.depth):
                self.depth.append(self.depth[state] + 1)
                self._fallback.append(0)
                self._match.append(-1)
            state = child
        if self._match[state] < 0:
            self._match[state] = number

    def _link(self) -> None:
        for edge, child in sorted(self._next.items(), key=lambda item: self.depth[item[1]]):
            parent, byte = edge >> 8, edge & 255
            if parent:
                self._fallback[child] = self.advance(self._fallback[parent], byte)
            if self._match[child] < 0:
                self._match[child] = self._match[self._fallback[child]]

    def advance(self, state: int, byte: int) -> int:
        """The state after one more byte; amortised O(1)."""
        while (child := self._next.get(state << 8 | byte)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return child

    def matched(self, state: int) -> int | None:
        """Number of the longest word that ends in this state."""
        number = self._match[state]
        return None if number < 0 else number


@lru_cache(maxsize=16)
def stop_words(words: tuple[bytes, ...]) -> StopWords:
    """The automaton, built once for a list that many requests send."""
    return StopWords(words)


class StopChecker:
    """One sequence's conditions to end.

    `num_kept` outputs may leave: no stop word can take them back. `drop_bytes` are to be cut from
    the last of them, and are set only when the sequence ends by a stop word.
    """

    __slots__ = (
        "_end_ids",
        "_held",
        "_include_stop",
        "_max_outputs",
        "_min_tokens",
        "_num_held_bytes",
        "_state",
        "_stop_ids",
        "_stop_words",
        "_vocab",
        "_words",
        "drop_bytes",
        "is_trivial",
        "num_kept",
        "watched",
    )

    def __init__(self, sampling: SamplingParams, vocab: RawBytes | None, max_outputs: int) -> None:
        assert vocab is not None or not sampling.stop_words, "stop words without a vocabulary"
        self._end_ids = frozenset(sampling.end_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._max_outputs = max_outputs
        self._include_stop = sampling.include_stop
        self._vocab = vocab
        self._stop_words = sampling.stop_words
        self.watched = self._end_ids | self._stop_ids
        self.is_trivial = not sampling.stop_words  # else more than watched tokens can end it
        self._words: StopWords | None = None  # built when there is a first token to match
        self._state = 0
        self._held: deque[int] = deque()  # sizes in bytes of the tokens after the first `num_kept`
        self._num_held_bytes = 0
        self.num_kept = 0
        self.drop_bytes = 0

    def is_end(self, token_id: int, num_outputs: int) -> bool:
        """Does this token end the sequence without being part of it, after `num_outputs`?"""
        return token_id in self._end_ids and num_outputs >= self._min_tokens

    def check(self, token_id: int, num_outputs: int) -> Ending | None:
        """Take output number `num_outputs` (from 1); how the sequence ends with it, if so."""
        may_stop = num_outputs > self._min_tokens
        if may_stop and token_id in self._stop_ids:
            self.num_kept = num_outputs if self._include_stop else num_outputs - 1
            return Ending(FinishReason.STOP, token_id)
        if not self._stop_words:
            self.num_kept = num_outputs
        elif (word := self._match(token_id, may_stop)) is not None:
            return Ending(FinishReason.STOP, word.decode("utf-8", "replace"))
        if num_outputs >= self._max_outputs:
            self.num_kept = num_outputs
            return Ending(FinishReason.LENGTH)
        return None

    def _match(self, token_id: int, may_stop: bool) -> bytes | None:
        """Feed one token's bytes; the word that ended in it. Moves `num_kept` and `drop_bytes`."""
        assert self._vocab is not None
        if self._words is None:
            self._words = stop_words(self._stop_words)
        words = self._words
        data = self._vocab.raw(token_id)
        self._held.append(len(data))
        self._num_held_bytes += len(data)
        state = self._state
        for used, byte in enumerate(data, start=1):
            state = words.advance(state, byte)
            number = words.matched(state) if may_stop else None
            if number is not None:
                self._cut(len(words.words[number]), rest=len(data) - used)
                return words.words[number]
        self._state = state
        self._release(0 if self._include_stop else words.depth[state])
        return None

    def _release(self, num_bytes: int) -> None:
        """Let go of the tokens that end before the last `num_bytes` bytes."""
        while self._held and self._num_held_bytes - self._held[0] >= num_bytes:
            self._num_held_bytes -= self._held.popleft()
            self.num_kept += 1

    def _cut(self, num_word_bytes: int, rest: int) -> None:
        """The sequence ends by a word that has `rest` bytes of the last token behind it."""
        self.drop_bytes = rest
        if self._include_stop:
            self.num_kept += len(self._held)
            return
        drop = rest + num_word_bytes
        self._release(drop)
        # The word begins at the border of a token, or inside the first one still held.
        inside = self._num_held_bytes - drop
        self.drop_bytes = self._held[0] - inside if inside else 0
        self.num_kept += inside > 0
