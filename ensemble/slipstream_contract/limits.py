"""The bounds of what a request may ask for. What depends on a model, its engine checks itself."""

import math
from collections.abc import Sequence

from slipstream_contract.errors import ContractError, clip

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

MAX_SEQUENCES = 256  # num_return_sequences, n
MAX_PENALTY = 1000.0  # presence and frequency, either sign; the repetition penalty and its inverse
MAX_BIAS = 1000.0  # added to one logit, either sign
MAX_BIASED_TOKENS = 4096
MAX_WORDS = 1024  # stop words, and bad words, and bias words
MAX_WORD_BYTES = 4096
MAX_WORD_TOKENS = 1024
MAX_STOP_BYTES = 1 << 14  # of all stop words of a request: the engine makes one automaton of them
GREEDY_BELOW = 1e-5
"""Smaller temperatures are 0: dividing by them leaves one token anyway, and overflows."""


def check_whole(field: str, value: int, low: int, high: int = INT32_MAX) -> int:
    """The value if it is in bounds. Raises ContractError naming field, value and limits."""
    if not low <= value <= high:
        raise ContractError(f"{field} is {clip(value)}, not a whole number from {low} to {high}")
    return value


def check_number(field: str, value: float, low: float, high: float = math.inf) -> float:
    """The value if it is finite and in bounds. Raises ContractError."""
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ContractError(f"{field} is {value:.7g}, not a finite number {bounds}")
    return value


def check_temperature(field: str, value: float) -> float:
    """A temperature; tiny ones become 0. Raises ContractError."""
    check_number(field, value, 0.0)
    return 0.0 if value < GREEDY_BELOW else value


def check_repetition_penalty(field: str, value: float) -> float:
    """A factor on logits, above 0. Raises ContractError."""
    return check_number(field, value, 1.0 / MAX_PENALTY, MAX_PENALTY)


def check_min_tokens(field: str, value: int, max_tokens: int) -> int:
    """Tokens before which no end counts. Raises ContractError if they are above `max_tokens`."""
    check_whole(field, value, 0)
    if value > max_tokens:
        raise ContractError(f"{field} is {value}, above the most tokens asked for, {max_tokens}")
    return value


def check_count(field: str, size: int, limit: int, what: str) -> None:
    """Raises ContractError if there are more than `limit` of something."""
    if size > limit:
        raise ContractError(f"{field} has {size} {what}, at most {limit} are served")


def check_word(field: str, word: bytes) -> bytes:
    """A word in UTF-8 if it is not too long. Raises ContractError."""
    if len(word) > MAX_WORD_BYTES:
        raise ContractError(
            f"{field} has a word of {len(word)} bytes, at most {MAX_WORD_BYTES} are served: "
            f"{clip(word)}"
        )
    return word


def check_words(field: str, words: Sequence[Sequence[int]]) -> None:
    """Words as token ids: neither too many nor too long. Raises ContractError."""
    check_count(field, len(words), MAX_WORDS, "words")
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_TOKENS:
        raise ContractError(
            f"{field} has a word of {longest} tokens, at most {MAX_WORD_TOKENS} are served"
        )
