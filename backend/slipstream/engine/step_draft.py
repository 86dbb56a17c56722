"""Collect what a step computes, within its budgets of tokens."""

from dataclasses import dataclass, field

from slipstream.core.sequence import Sequence
from slipstream.engine.prefill_budget import PrefillBudget


@dataclass(slots=True)
class StepDraft:
    """A step while it is being scheduled."""

    budget: int  # tokens that it can still take
    long_budget: int | None  # of long prompts; None: not taken from `PrefillBudget` yet
    num_long: int  # long prompts in prefill
    decodes: list[Sequence]
    prefill_budget: PrefillBudget
    long_tokens: int  # a prompt with more is long
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)

    def add_tokens(self, sequence: Sequence) -> None:
        """Add as many tokens of a sequence to the step as the budgets allow."""
        num_left = sequence.num_tokens - sequence.num_scheduled
        num_tokens = min(num_left, self.budget, sequence.cache.capacity - sequence.num_scheduled)
        if num_left > 1 and sequence.num_tokens > self.long_tokens:
            if self.long_budget is None:
                self.long_budget = self.prefill_budget.take(
                    max(1, self.num_long), sequence.num_scheduled
                )
            num_tokens = min(num_tokens, self.long_budget)
            self.long_budget -= num_tokens
        if num_tokens == num_left == 1:
            self.decodes.append(sequence)  # a single token that samples is a decode
        elif num_tokens:
            self.chunks.append((sequence, num_tokens))
        self.budget -= num_tokens
