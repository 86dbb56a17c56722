"""Guides by llguidance: an Earley parser over a lexer of derivatives, all of it made lazily.

Each step of a grammar, and its start, has a bound in the library's own units ("fuel"): a grammar
that is too much costs its sender an error, which names the bound, and others nothing.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from slipstream_contract.errors import clip
from slipstream_contract.guide import Guide

from slipstream.guide.interface import GuideError, Matcher, Template
from slipstream.guide.lowering import grammar_of

_LIMITS = LLParserLimits(
    max_items_in_row=20_000,  # a choice of thousands
    initial_lexer_fuel=4_000_000,  # 80 ms
    step_lexer_fuel=400_000,  # 30 ms
    step_max_items=100_000,  # 5 ms
    max_lexer_states=50_000,  # 100 MB
    max_grammar_size=500_000,
    verbose_errors=False,
)
_MARK = 0xFF  # the library's own byte for special tokens, which no text in UTF-8 has
_BYTES_A_CHARACTER = 64  # of a compiled grammar for each of its text, measured
_BYTES_AT_LEAST = 64 << 10
_MAX_ERROR = 300


_MOST_THREADS = 16


def num_filling_threads() -> int:
    """Return how many threads make masks: all cores but one."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 2) - 1))


class Follower:
    """A matcher of llguidance. The library checks that no two threads use it at a time."""

    __slots__ = ("_matcher", "_num_mask_bytes")

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    @property
    def is_accepting(self) -> bool:
        """Whether an end is legal."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end is legal."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def matcher(self) -> LLMatcher:
        """The library's own."""
        return self._matcher

    @property
    def error(self) -> str:
        """Why it cannot go on: its mask is that of an end, which is not legal. Empty if it can."""
        return _shortened(self._matcher.get_error()) if self._matcher.is_error() else ""

    def fill(self, address: int) -> None:
        """Write the mask of the next token to memory. Raises GuideError."""
        self._matcher.unsafe_compute_mask_ptr(address, self._num_mask_bytes)
        if error := self.error:
            raise GuideError(error)

    def take(self, token_id: int) -> bool:
        """Take a token if it is legal. Raises GuideError."""
        is_legal = self._matcher.try_consume_tokens([token_id]) == 1
        if not is_legal and self._matcher.is_error():
            raise GuideError(_shortened(self._matcher.get_error()))
        return is_legal

    def forced(self, most: int) -> list[int]:
        """Return at most `most` tokens that have to come next."""
        return self._matcher.compute_ff_tokens()[:most]

    def roll_back(self, count: int) -> None:
        """Untake the last `count` tokens."""
        if count and not self._matcher.rollback(count):
            raise GuideError(_shortened(self._matcher.get_error()))

    def copy(self) -> "Follower":
        """Return another matcher at the same place, with what the lexer has built so far."""
        return Follower(self._matcher.deep_copy(), self._num_mask_bytes)


class Compiler:
    """A tokenizer as llguidance has it, and the compiling of guides for it."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        end_ids: Sequence[int],
        raw: Callable[[int], bytes],
    ) -> None:
        """Set up the tokenizer; that takes seconds for one of 128k tokens.

        Args:
            tokenizer_json: text of the file.
            vocab_size: number of the model's logits.
            end_ids: all that the checkpoint ends by.
            raw: a token's bytes, which must be those that the library has for it.

        Raises GuideError with the first token whose bytes differ.
        """
        if not end_ids:
            raise GuideError("the checkpoint names no token that ends a text (eos_token_id)")
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_json,
                n_vocab=vocab_size,
                eos_token=list(end_ids),
                slices=LLTokenizer.json_slices(),
            )
        except Exception as error:  # the library raises whatever its parts do
            raise GuideError(f"llguidance cannot read the tokenizer: {error}") from None
        self.num_mask_bytes = -(-vocab_size // 32) * 4
        self.end_ids = frozenset(end_ids)
        # Masks allow these as text, but sampled they end the output.
        texts = (each for each in end_ids if not self._tokenizer.is_special_token(each))
        self._text_ends = frozenset(texts)
        self._executor = LLExecutor(num_filling_threads())
        self._check_bytes(vocab_size, raw)

    def _check_bytes(self, vocab_size: int, raw: Callable[[int], bytes]) -> None:
        tokenizer = self._tokenizer
        for token_id in range(vocab_size):
            own = raw(token_id)
            theirs = tokenizer.decode_bytes([token_id])
            if own == theirs or _MARK in own or tokenizer.is_special_token(token_id):
                continue
            if own:  # else the tokenizer does not have it: no mask allows it
                raise GuideError(
                    f"token {token_id} of the tokenizer is {clip(own)}, but llguidance reads "
                    f"{clip(theirs)}"
                )

    def compile(self, guide: Guide) -> Template:
        """Return a compiled guide with its first mask. Raises GuideError."""
        grammar = grammar_of(guide)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GuideError(_shortened(matcher.get_error()))
        follower = Follower(matcher, self.num_mask_bytes)
        mask = ctypes.create_string_buffer(self.num_mask_bytes)
        follower.fill(ctypes.addressof(mask))
        if not any(mask.raw):
            raise GuideError("no text of this model's tokens follows the guide")
        size = _BYTES_AT_LEAST + _BYTES_A_CHARACTER * len(grammar) + self.num_mask_bytes
        return Template(follower, mask.raw, size, text_ends=self._text_ends)

    def fill_all(self, matchers: Sequence[Matcher], address: int) -> list[str]:
        """Write the masks of several matchers to memory, one after another; return their errors."""
        followers = cast("Sequence[Follower]", matchers)
        places = [(follower.matcher, i) for i, follower in enumerate(followers)]
        size = self.num_mask_bytes
        self._executor.unsafe_compute_mask_ptr(places, address, size, len(places))
        return [follower.error for follower in followers]


def _shortened(error: str) -> str:
    """Return the library's words in one line, without the grammar, which may be a megabyte."""
    lines = [line.strip() for line in error.splitlines()]
    text = " ".join(line for line in lines if line)
    text = text.replace("Unimplemented keys", "keywords that are not served")
    text = text.replace("NoExtensionBias <non-verbose/>", "no text follows the guide")
    return text if len(text) <= _MAX_ERROR else f"{text[: _MAX_ERROR - 3]}..."
