"""Choose between prompt lookup and suffix drafts: what follows the longer match.

Both find the end of a sequence where it occurred before. Lookup takes the last place in the
sequence itself, and goes on for as long as drafts are wanted; suffix drafts look further, into
ended outputs too, and vote. Of equal matches lookup's counts: what was said last is said again.
"""

from slipstream.core.drafts import Proposal
from slipstream.core.sequence import Sequence
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.suffix import DEEPEST, SuffixDrafts


class LongestMatch:
    """The drafts of two drafters; a `Drafter`."""

    def __init__(self, lookup: PromptLookup, suffix: SuffixDrafts) -> None:
        self._lookup = lookup
        self._suffix = suffix

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return at most `k` tokens that follow the longer match; see `Drafter`."""
        longest, length = self._suffix.propose_longest(sequence, k)
        last = self._lookup.propose(sequence, k)
        length = min(length, DEEPEST)
        if last.token_ids and self._lookup.match_length(sequence, length) >= length:
            return last
        return longest

    def release(self, sequence: Sequence) -> None:
        """Discard what both hold of a sequence, which has ended."""
        self._lookup.release(sequence)
        self._suffix.release(sequence)
