"""Rules: edits of the next token that depend on the tokens before it, and on nothing else."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from slipstream_contract.ids import TokenIds


class RuleError(Exception):
    """What a rule did wrong, with its field."""


class Rule(Protocol):
    """A rule of one sequence.

    It may keep what it has read of the outputs; drafts leave no trace in it.
    """

    @property
    def field(self) -> str:
        """The field that asks for it, as errors name it."""

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return what is added to logits of the token after prompt, outputs and drafts.

        The outputs are those of the last call, and more, unless `fork` was called. What this
        raises ends its sequence alone.
        """

    def fork(self) -> None:
        """Note that the next outputs may be others."""


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return with how many of the same tokens two texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (one, other) in pairs if one != other), shorter)


class Phrases:
    """Bad words of several tokens: bans the last one wherever the others are there."""

    field = "bad_words"

    def __init__(self, words: tuple[tuple[int, ...], ...], prompt: TokenIds) -> None:
        most = max(map(len, words)) - 1
        self._before = prompt[-most:].tolist()
        self._most = most
        self._heads: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        for word in words:
            self._heads.setdefault(word[-2], []).append(word)

    def addends(self, outputs: Sequence[int], drafts: Sequence[int]) -> Mapping[int, float]:
        """Return the bans of the token after outputs and drafts."""
        seen = [*outputs[max(0, len(outputs) - self._most) :], *drafts]
        if len(seen) < self._most:
            seen = self._before + seen
        return {
            word[-1]: -inf
            for word in (self._heads.get(seen[-1], ()) if seen else ())
            if tuple(seen[1 - len(word) :]) == word[:-1]
        }

    def fork(self) -> None:
        """Do nothing: nothing is kept."""
