"""Collect what a step computes: decodes, then prompts by due time, within its budgets of tokens.

A prompt is due `STRETCH` times its own computation after it was queued; the earliest due time goes
first. So a short prompt goes before a long one that came a little earlier, and a prompt whose
computation takes w is overtaken only by those that come less than `STRETCH * w` after it: that is
all the harm. What is left to compute counts, so a prompt comes nearer to its turn with each chunk.
A level of priority counts as much as the longest prompt that is not long.

Beside decodes all prompts together get what `PrefillBudget.room` says, unless one is overdue, and
the long ones of them what `PrefillBudget.take` says. If they claim more than there is room for, the
room is what the device computes in the same time (`PrefillBudget.filled`). Where nothing decodes,
the first may take the whole step.

Where tokens of a prompt see those behind them, a prompt is computed in one step or waits for the
next, whatever decodes take: what prompts get is not limited then but by the step's budget.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.engine.prefill_budget import PrefillBudget

STRETCH = 4
_NO_WINDOW = AttentionWindow()


@dataclass(slots=True, order=True)
class _Claim:
    """Tokens that a prompt may get at most, and its place among others."""

    due_ns: float
    id: int
    num_tokens: int = field(compare=False)
    sequence: Sequence = field(compare=False)
    is_long: bool = field(compare=False)
    least: int = field(compare=False, default=0)  # tokens, or none


@dataclass(slots=True)
class StepDraft:
    """A step while it is being scheduled."""

    budget: int  # tokens that it can take beside the decodes
    decodes: list[Sequence]
    num_long: int  # long prompts in prefill
    prefill_budget: PrefillBudget
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    long_budget: int | None = None  # of long prompts; None: not taken from `PrefillBudget` yet
    cuts_prompts: bool = True  # False: a prompt is computed whole
    window: AttentionWindow = _NO_WINDOW  # whose borders no chunk crosses
    _claims: list[_Claim] = field(default_factory=list)  # in their order
    _num_claimed: int = 0
    _found_room: int | None = None  # None: no prompt has asked yet

    def __post_init__(self) -> None:
        if not self.decodes or not self.cuts_prompts:
            self.long_budget = self.budget

    @property
    def _room(self) -> int:
        """Tokens of all prompts; most steps have none, and measure nothing for them."""
        if self._found_room is None:
            is_limited = self.decodes and self.cuts_prompts
            room = self.prefill_budget.room(len(self.decodes)) if is_limited else self.budget
            self._found_room = min(self.budget, room)
        if self._num_claimed <= self._found_room or self._found_room == self.budget:
            return self._found_room
        filled = self.prefill_budget.filled(len(self.decodes), self._found_room)
        return min(self.budget, filled)

    def due_ns(self, sequence: Sequence) -> float:
        """Return when a prompt is due, by the scheduler's clock."""
        work_ns = self.prefill_budget.work_ns(sequence.num_tokens - sequence.num_scheduled)
        level_ns = sequence.request.message.priority * self.prefill_budget.longest_ns
        return sequence.queued_ns + STRETCH * (work_ns + level_ns)

    def has_room_for(self, sequence: Sequence) -> bool:
        """Return whether a prompt would get tokens."""
        self._widen_for(sequence)
        if self._num_claimed < self._room:
            return True
        granted = [(claim, num_tokens) for claim, num_tokens in self._grants() if num_tokens]
        if sum(num_tokens for _, num_tokens in granted) < self._room:
            return True
        return bool(granted) and self.due_ns(sequence) < granted[-1][0].due_ns

    @property
    def has_room_for_long(self) -> bool:
        """Whether another long prompt would get tokens; True while none has come."""
        taken = sum(num_tokens for claim, num_tokens in self._grants() if claim.is_long)
        return self.long_budget is None or taken < self.long_budget

    def offer(self, sequence: Sequence) -> None:
        """Let a prompt claim as many tokens as the budgets allow."""
        num_left = sequence.num_tokens - sequence.num_scheduled
        num_tokens = min(num_left, self.budget, sequence.cache.capacity - sequence.num_scheduled)
        if (most := self.window.up_to_border(sequence.num_scheduled)) is not None:
            num_tokens = min(num_tokens, most)
        if num_tokens <= 0:
            return
        is_long = num_left > 1 and self.prefill_budget.is_long(sequence.num_tokens)
        self._widen_for(sequence)
        if is_long and self.long_budget is None:
            num_long, start = max(1, self.num_long), sequence.num_scheduled
            self.long_budget = self.prefill_budget.take(len(self.decodes), num_long, start)
        claim = _Claim(self.due_ns(sequence), sequence.id, num_tokens, sequence, is_long)
        if not self.cuts_prompts:
            claim.least = sequence.num_prompt - sequence.num_scheduled
        insort(self._claims, claim)
        self._num_claimed += num_tokens
        if self._num_claimed > self.budget:  # less room may still widen to it
            granted = self._grants(self.budget)
            self._claims = [claim for claim, num_tokens in granted if num_tokens]
            self._num_claimed = sum(claim.num_tokens for claim in self._claims)

    def _widen_for(self, sequence: Sequence) -> None:
        """Let prompts have the whole step if one that is not long has waited for too long."""
        budget = self.prefill_budget
        if self._room == self.budget or budget.is_long(sequence.num_tokens):
            return
        if budget.is_overdue(sequence.queued_ns, budget.work_ns(sequence.num_tokens)):
            self._found_room = self.budget

    def _grants(self, room: int | None = None) -> Iterator[tuple[_Claim, int]]:
        """Yield the claims in their order, and what each gets of the room, or of another."""
        if not self._claims:
            return
        room, long_budget = self._room if room is None else room, self.long_budget or 0
        for claim in self._claims:
            num_tokens = min(claim.num_tokens, room)
            if claim.is_long:
                num_tokens = min(num_tokens, long_budget)
            if num_tokens < claim.least:
                num_tokens = 0
            long_budget -= num_tokens if claim.is_long else 0
            room -= num_tokens
            yield claim, num_tokens

    def fill(self) -> None:
        """Give prompts their tokens, in their order."""
        for claim, num_tokens in self._grants():
            sequence = claim.sequence
            if num_tokens == sequence.num_tokens - sequence.num_scheduled == 1:
                self.decodes.append(sequence)  # a single token that samples is a decode
            elif num_tokens:
                self.chunks.append((sequence, num_tokens))
            self.budget -= num_tokens
