"""Decide when a sequence ends, and which of its tokens can be sent before that is certain.

Stop words are matched on bytes, because a tokenizer may split a word anywhere, even inside a
character. All stop words of a request form one automaton (Aho and Corasick, 1975): one transition a
byte, however many words there are. The depth of its state is the number of last bytes that may
still become a stop word:

    ... bytes that are certain | depth bytes withheld
                               ^ a token that ends after this point waits
"""

from array import array
from collections import deque
from functools import lru_cache
from typing import NamedTuple, Protocol

from slipstream_contract.sampling import SamplingParams

from slipstream.wire import FinishReason


class RawBytes(Protocol):
    """The part of the vocabulary that stop words need."""

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of a token; for a special token, those of its text."""


class Ending(NamedTuple):
    """The reason why a sequence ended; `stop_reason` is the stop token id or the stop word.

    `is_refusal`: an error that the request makes, and would make again, such as bans of all tokens.
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    is_refusal: bool = False


class StopWords:
    """The automaton of a request's stop words. It is immutable, and shared by all sequences."""

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
        """Return the state after one more byte; amortised O(1)."""
        while (child := self._next.get(state << 8 | byte)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return child

    def matched(self, state: int) -> int | None:
        """Return the number of the longest word that ends in this state, or None."""
        number = self._match[state]
        return None if number < 0 else number


@lru_cache(maxsize=16)
def stop_words(words: tuple[bytes, ...]) -> StopWords:
    """Return the automaton of a list of words, built once for all requests with the same list."""
    return StopWords(words)


class StopChecker:
    """The end conditions of one sequence.

    The first `num_sendable` outputs can be sent: no stop word can remove them any more.
    `drop_bytes` are to be cut from the end of the last of them; it is 0 unless the sequence ends by
    a stop word.
    """

    __slots__ = (
        "_end_ids",
        "_include_stop",
        "_max_outputs",
        "_min_tokens",
        "_num_withheld_bytes",
        "_state",
        "_stop_ids",
        "_stop_words",
        "_vocab",
        "_withheld",
        "_words",
        "drop_bytes",
        "is_trivial",
        "num_sendable",
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
        self.is_trivial = not sampling.stop_words  # only `watched` tokens and the length can end it
        self._words: StopWords | None = None  # built at the first token
        self._state = 0
        self._withheld: deque[int] = deque()  # bytes of each token not yet sendable
        self._num_withheld_bytes = 0
        self.num_sendable = 0
        self.drop_bytes = 0

    def copy(self) -> "StopChecker":
        """Return a checker of another sequence that starts with the same tokens."""
        other = StopChecker.__new__(StopChecker)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other._withheld = self._withheld.copy()
        return other

    def is_end(self, token_id: int, num_outputs: int) -> bool:
        """Return whether this token, after `num_outputs`, is an end id: the end, and no output."""
        return token_id in self._end_ids and num_outputs >= self._min_tokens

    def take_token(self, token_id: int, num_outputs: int) -> Ending | None:
        """Take output number `num_outputs` (from 1); return how the sequence ends, if it does."""
        may_stop = num_outputs > self._min_tokens
        if may_stop and token_id in self._stop_ids:
            self.num_sendable = num_outputs if self._include_stop else num_outputs - 1
            return Ending(FinishReason.STOP, token_id)
        if not self._stop_words:
            self.num_sendable = num_outputs
        elif (word := self._match(token_id, may_stop)) is not None:
            return Ending(FinishReason.STOP, word.decode("utf-8", "replace"))
        if num_outputs >= self._max_outputs:
            self.num_sendable = num_outputs
            return Ending(FinishReason.LENGTH)
        return None

    def _match(self, token_id: int, may_stop: bool) -> bytes | None:
        """Advance by one token; return the stop word that ended in it. Updates `num_sendable`."""
        assert self._vocab is not None
        if self._words is None:
            self._words = stop_words(self._stop_words)
        words = self._words
        data = self._vocab.raw(token_id)
        self._withheld.append(len(data))
        self._num_withheld_bytes += len(data)
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
        """Make those tokens sendable that end before the last `num_bytes` bytes."""
        while self._withheld and self._num_withheld_bytes - self._withheld[0] >= num_bytes:
            self._num_withheld_bytes -= self._withheld.popleft()
            self.num_sendable += 1

    def _cut(self, num_word_bytes: int, rest: int) -> None:
        """End by a word of `num_word_bytes` bytes, followed by `rest` bytes of the last token."""
        self.drop_bytes = rest
        if self._include_stop:
            self.num_sendable += len(self._withheld)
            return
        drop = rest + num_word_bytes
        self._release(drop)
        # The word starts at a token's border, or inside the first token still withheld.
        inside = self._num_withheld_bytes - drop
        self.drop_bytes = self._withheld[0] - inside if inside else 0
        self.num_sendable += inside > 0
