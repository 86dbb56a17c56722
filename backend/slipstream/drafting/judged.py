"""Learn how often drafts are right, of each drafter, for each sequence.

A drafter may say how likely each draft is; what is learned then is by how much that is too much or
too little: right drafts over those expected to be right, in sums that fade. A mean that is moved
draft by draft would always be read right after a wrong one, and so too low. What one sequence has
not shown yet is what all have shown.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from slipstream.core.drafts import Proposal

_START = 0.3  # of drafts that are right, of a drafter that says no chances, before any was judged
_START_WEIGHT = 4.0  # judged drafts that this counts as
_FADE = 0.95  # of a sequence's judged drafts, for each step that judges more
_FADE_ALL = 0.995  # of those of all sequences
_WEIGHT = 4.0  # judged drafts of a sequence that those of all count as


@dataclass(slots=True)
class _Sums:
    """Drafts that were judged, the older the less."""

    expected: float = 0.0  # to be right
    right: float = 0.0

    def add(self, expected: float, num_right: int, fade: float) -> None:
        """Add those of one step."""
        self.expected = fade * self.expected + expected
        self.right = fade * self.right + num_right


@dataclass(slots=True)
class Record:
    """What is known of a sequence's drafts."""

    sums: dict[str, _Sums] = field(default_factory=dict)  # by drafter
    proposal: Proposal | None = None  # the last one
    place: int = -1  # number of known tokens at which its first draft is judged; -1: it is not


class Learning:
    """What all sequences have shown, by drafter."""

    def __init__(self) -> None:
        """Start with nothing judged."""
        self._all: dict[str, _Sums] = {}

    def survival(self, record: Record, proposal: Proposal) -> list[float]:
        """Return for each draft how likely it and all before it are right."""
        chances = proposal.chances
        if proposal.is_certain:
            assert chances is not None
            return list(accumulate(chances, mul))
        total, own = self._sums(proposal), record.sums.get(proposal.drafter) or _Sums()
        prior = _WEIGHT * total.right / total.expected
        ratio = (own.right + prior) / (own.expected + _WEIGHT)
        if chances is None:
            chances = [1.0] * len(proposal.token_ids)
        return list(accumulate([min(1.0, ratio * chance) for chance in chances], mul))

    def judge(self, record: Record, num_right: int, num_wrong: int) -> None:
        """Add the first drafts of a record's proposal, which is judged then."""
        proposal, count, record.place = record.proposal, num_right + num_wrong, -1
        if proposal is None or proposal.is_certain or not count:
            return
        expected = float(count) if proposal.chances is None else sum(proposal.chances[:count])
        own = record.sums.setdefault(proposal.drafter, _Sums())
        own.add(expected, num_right, _FADE)
        self._sums(proposal).add(expected, num_right, _FADE_ALL)

    def _sums(self, proposal: Proposal) -> _Sums:
        """Return those of all sequences."""
        found = self._all.get(proposal.drafter)
        if found is None:
            start = _START if proposal.chances is None else 1.0
            found = self._all[proposal.drafter] = _Sums(_START_WEIGHT, _START_WEIGHT * start)
        return found
