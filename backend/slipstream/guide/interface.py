"""The door to a library of grammars: what the engine asks of it, and nothing of how it answers.

A mask has one bit a token, token `t` at bit `t % 32` of the little-endian word `t // 32`. Where the
bit is 1 the token is legal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream_contract.guide import Guide


class GuideError(Exception):
    """A guide that cannot be compiled or followed; the text names the keyword or the bound."""


def reason_of(error: Exception) -> str:
    """Return why a guide cannot go on, after what a matcher raised."""
    return str(error) if isinstance(error, GuideError) else f"{type(error).__name__} in the matcher"


class Matcher(Protocol):
    """A place in a grammar: that after the tokens taken so far. Used by one thread at a time.

    Whatever a library raises ends the sequence alone.
    """

    @property
    def is_accepting(self) -> bool:
        """Whether the tokens taken are a whole text of the grammar, so that an end is legal."""

    @property
    def is_finished(self) -> bool:
        """Whether they are one, and no token but an end is legal."""

    def fill(self, address: int) -> None:
        """Write the mask of the next token to memory; a library may hold the interpreter lock.

        An end id is legal where `is_accepting`. Raises GuideError if that breaks a bound.
        """

    def take(self, token_id: int) -> bool:
        """Take a token, no end id, if it is legal; return whether it is."""

    def forced(self, most: int) -> list[int]:
        """Return at most `most` tokens that have to come next."""

    def roll_back(self, count: int) -> None:
        """Untake the last `count` tokens."""

    def copy(self) -> "Matcher":
        """Return another matcher at the same place."""


MIN_FAST = 8  # masks in a row after which a guide is fast


@dataclass(slots=True)
class Pace:
    """How long the masks of a guide took lately; others do not wait for those of a slow one."""

    num_fast: int = 0  # in a row
    is_slow: bool = False  # the last one was

    @property
    def is_fast(self) -> bool:
        """Whether masks of the guide can be relied on to come while a step runs."""
        return self.num_fast >= MIN_FAST

    def note(self, is_fast: bool) -> None:
        """Count a mask."""
        self.num_fast = self.num_fast + 1 if is_fast else 0
        self.is_slow = not is_fast


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled guide. Its matcher stands at the start, and is copied for each sequence."""

    matcher: Matcher
    first_mask: bytes  # of the first token
    num_bytes: int  # of memory, an estimate
    pace: Pace = field(default_factory=Pace)
    text_ends: frozenset[int] = frozenset()  # the checkpoint's ends that are text elsewhere


class GuideCompiler(Protocol):
    """A tokenizer's compiler of guides; `compile` may run in several threads at a time."""

    num_mask_bytes: int
    end_ids: frozenset[int]

    def compile(self, guide: Guide) -> Template:
        """Return a compiled guide. Raises GuideError."""

    def fill_all(self, matchers: Sequence[Matcher], address: int) -> list[str]:
        """Write the masks of several matchers to memory, one after another; return their errors.

        They are made side by side, without the interpreter lock. An error is empty where there is
        none.
        """


MakeCompiler = Callable[[], GuideCompiler]
"""The set-up of a tokenizer, which takes seconds where it is large. Raises GuideError."""
