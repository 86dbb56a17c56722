"""Forced drafts: what a guide leaves no choice of, such as the names of properties.

They are right for certain, as their rows sample with the masks of the guide. Where nothing is
forced, another drafter proposes, but for sequences whose every row needs a mask: to make the masks
of drafts that may be wrong costs more than these bring.
"""

from slipstream.core.drafts import Drafter, Proposal
from slipstream.core.sequence import Sequence

_NAME = "forced"


class WithForced:
    """Forced drafts before those of another drafter, if there is one; a `Drafter`."""

    def __init__(self, other: Drafter | None) -> None:
        self._other = other

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return at most `k` tokens; see `Drafter`."""
        guide = sequence.guide
        if guide is not None:
            # A row behind the last forced token samples freely, and would need its mask.
            drafts = guide.forced[:-1] if guide.needs_all else guide.forced
            if drafts or guide.needs_all:
                count = min(k, len(drafts))
                return Proposal(drafts[:count], _NAME, [1.0] * count, is_certain=True)
        if self._other is None:
            return Proposal([], _NAME)
        return self._other.propose(sequence, k)

    def release(self, sequence: Sequence) -> None:
        """Discard what the other drafter holds of a sequence, which has ended."""
        if self._other is not None:
            self._other.release(sequence)
