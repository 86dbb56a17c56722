"""Prompt lookup: what followed the last tokens when they occurred before follows them again.

An edit of a file, an answer from a passage, a list with equal lines: such outputs repeat what is in
the prompt or in the output before. For each sequence an index maps every run of `NGRAM` tokens to
the place behind its last occurrence. A new token costs one entry, a proposal one look-up.
"""

from array import array

from slipstream.core.drafts import Proposal
from slipstream.core.sequence import Sequence

NGRAM = 3  # tokens that must match
MAX_TOKENS = 1 << 20  # of all sequences in the index, some 150 bytes each; others get no drafts


class _Text:
    """The known tokens of one sequence, and their index."""

    __slots__ = ("match", "places", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.places: dict[tuple[int, ...], int] = {}  # behind the last occurrence
        self.match = -1  # behind the last occurrence but one of the last tokens; -1: none

    def extend(self, token_ids: "array[int]") -> None:
        """Add tokens."""
        text, places = self.token_ids, self.places
        text.extend(token_ids)
        end = len(text)
        for place in range(max(NGRAM, end - len(token_ids) + 1), end + 1):
            ngram = tuple(text[place - NGRAM : place])
            self.match = places.get(ngram, -1)
            places[ngram] = place


class PromptLookup:
    """Drafts that repeat the prompt and the output; a `Drafter`."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        """Start empty; sequences beyond `max_tokens` in the index get no drafts."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._texts: dict[int, _Text] = {}

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return `k` tokens that followed the last ones before, or none; see `Drafter`."""
        text = self._updated(sequence)
        return Proposal([] if text is None else self._followers(text, k), "lookup")

    @staticmethod
    def _followers(text: _Text, k: int) -> list[int]:
        """Return the `k` tokens behind the match."""
        if text.match < 0:
            return []
        token_ids, place = text.token_ids, text.match
        drafts = token_ids[place : place + k].tolist()
        period = len(token_ids) - place  # where the match reaches the end, it goes on from itself
        while len(drafts) < k:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def match_length(self, sequence: Sequence, most: int) -> int:
        """Return how many last tokens of a sequence its match shares, at most `most`; 0: none."""
        text = self._texts.get(sequence.id)
        if text is None or text.match < 0:
            return 0
        token_ids, end, length = text.token_ids, len(text.token_ids), NGRAM
        most = min(most, text.match)
        while length < most and token_ids[text.match - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length

    def _updated(self, sequence: Sequence) -> _Text | None:
        """Return the sequence's text with all known tokens; None: there is no room for it."""
        text = self._texts.get(sequence.id)
        start = 0 if text is None else len(text.token_ids)
        num_new = sequence.num_known - start
        if self._num_tokens + num_new > self._max_tokens:
            self.release(sequence)
            return None
        if text is None:
            text = self._texts[sequence.id] = _Text()
        if num_new:
            text.extend(sequence.ids(start, sequence.num_known))
            self._num_tokens += num_new
        return text

    def release(self, sequence: Sequence) -> None:
        """Discard a sequence's index."""
        text = self._texts.pop(sequence.id, None)
        if text is not None:
            self._num_tokens -= len(text.token_ids)
