"""Suffix drafts: the longest end of a sequence that occurred before says what follows.

It is looked for in the sequence itself and in the outputs of sequences that ended not long ago, of
the same `cache_salt`: agents, templates and tests say the same again and again. Where the longest
end occurs several times, its followers vote, and their shares are the chances of the drafts (Oliaro
et al., 2024, arXiv 2411.04975). The longer the end, the more tokens it says.

    sequence   ... the quick brown fox           longest end that occurred: "quick brown"
    before     the quick brown dog ... a quick brown fox ran ... a quick brown fox sat
    drafts     fox (2 of 3), ran (1 of 2), ...

A new token continues the occurrences found before, or costs one look-up; a proposal reads at most
`MOST` of them. What is new and long, a prompt or an output that ended, is indexed piece by piece:
each proposal does at most a bounded part of it, and of removing what is too much.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from slipstream.core.drafts import Proposal
from slipstream.core.sequence import Sequence
from slipstream.drafting.corpus import NGRAM, Corpus, Text

MOST = 8  # occurrences that vote
DEEPEST = 32  # tokens of an end that are compared at once
_PER_TOKEN = 1.0  # drafts for each token of the longest end
_PIECE = 64  # tokens that a proposal pays for, to index or to remove
_MOST_PAID = 4096  # tokens that may be paid for in advance


class _Reader:
    """A sequence, and where its longest end occurred."""

    __slots__ = ("length", "matches", "own", "salt", "text")

    def __init__(self, salt: str) -> None:
        self.text = Text(0)
        self.own = Corpus()
        self.salt = salt
        self.matches: list[tuple[Text, int]] = []  # texts, and the places behind
        self.length = 0  # of the end


class SuffixDrafts:
    """Drafts that follow the longest end which occurred before; a `Drafter`.

    Args:
        max_tokens: of all that is held; the outputs that ended first are dropped for new ones, and
            sequences for which there is still no room get no drafts.
        most: occurrences that vote.
    """

    def __init__(self, max_tokens: int = 1 << 20, most: int = MOST) -> None:
        self._max_tokens = max_tokens
        self._most = most
        self._readers: dict[int, _Reader] = {}
        self._corpora: dict[str, Corpus] = {}  # of ended outputs, by salt
        self._ended: deque[tuple[str, Text]] = deque()  # the first to be dropped first
        self._behind: deque[tuple[str, Text]] = deque()  # those not indexed yet
        self._num_tokens = 0
        self._next_number = 0
        self._paid = _MOST_PAID

    @property
    def num_tokens(self) -> int:
        """Number of tokens held."""
        return self._num_tokens

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return at most `k` tokens that follow the longest end, or none; see `Drafter`."""
        return self.propose_longest(sequence, k)[0]

    def propose_longest(self, sequence: Sequence, k: int) -> tuple[Proposal, int]:
        """Return a proposal, and the length of the end that says it."""
        self._paid = min(self._paid + _PIECE, _MOST_PAID)
        self._catch_up()
        reader = self._updated(sequence)
        if reader is None or not reader.matches:
            return Proposal([], "suffix"), 0
        count = min(k, max(1, int(reader.length * _PER_TOKEN)))
        own = reader.text
        drafts, chances = _vote([_following(*match, count, own) for match in reader.matches])
        return Proposal(drafts, "suffix", chances), reader.length

    def release(self, sequence: Sequence) -> None:
        """Keep the output of a sequence, which has ended, for others."""
        reader = self._readers.pop(sequence.id, None)
        if reader is None:
            return
        self._num_tokens -= len(reader.text.token_ids)
        output = sequence.ids(sequence.num_prompt, sequence.num_known)
        if len(output) > NGRAM and self._has_room(len(output)):
            self._num_tokens += len(output)
            text = Text(self._next_number, output)
            self._next_number += 1
            self._ended.append((reader.salt, text))
            self._behind.append((reader.salt, text))

    def _updated(self, sequence: Sequence) -> _Reader | None:
        """Return a sequence's reader at its last known token; None: it is not there yet."""
        reader = self._readers.get(sequence.id)
        if reader is None:
            reader = self._readers[sequence.id] = _Reader(sequence.request.message.cache_salt)
        text = reader.text
        held, known = len(text.token_ids), sequence.num_known
        if known > held:
            if not self._has_room(known - held):
                return None
            text.token_ids.extend(sequence.ids(held, known))
            self._num_tokens += known - held
        start = text.num_indexed
        if known - start > self._paid:
            reader.own.index(text, start + self._paid)
            reader.matches, self._paid = [], 0
            return None
        if known - start > DEEPEST:  # a prompt: only its end matters
            reader.own.index(text, known - 1)
            reader.matches = []
        self._paid -= known - start
        for place in range(text.num_indexed + 1, known + 1):
            self._advance(reader, place)
        return reader

    def _advance(self, reader: _Reader, place: int) -> None:
        """Take the token before a place, the next one."""
        text, own = reader.text, reader.own
        token_id = text.token_ids[place - 1]
        own.index(text, place)
        reader.length += 1
        reader.matches = [
            (other, end + 1)
            for other, end in reader.matches
            if end + 1 < len(other.token_ids) and other.token_ids[end] == token_id
        ]
        if reader.matches or place < NGRAM:
            return
        found = [own.occurrences(own.before(text, place), self._most)]
        corpus = self._corpora.get(reader.salt)
        if corpus is not None:
            found.append(corpus.occurrences(corpus.last(text.key(place)), self._most))
        reader.matches, reader.length = _longest(text, place, chain(*found))

    def _has_room(self, count: int) -> bool:
        """Return whether so many tokens more may be held; drop outputs for them, piece by piece."""
        while self._num_tokens + count > self._max_tokens and self._ended and self._paid > 0:
            salt, text = self._ended[0]
            corpus = self._corpora.get(salt)
            if corpus is None:
                corpus = self._corpora[salt] = Corpus()
            removed = corpus.remove(text, self._paid)
            self._paid -= removed
            self._num_tokens -= removed
            if not text.token_ids:
                self._ended.popleft()
                if not corpus:
                    del self._corpora[salt]
        return self._num_tokens + count <= self._max_tokens

    def _catch_up(self) -> None:
        """Index outputs that have ended, as far as that is paid for."""
        while self._behind and self._paid > 0:
            salt, text = self._behind[0]
            end, start = len(text.token_ids), text.num_indexed
            if end > start:
                corpus = self._corpora.setdefault(salt, Corpus())
                corpus.index(text, min(end, start + self._paid))
                self._paid -= text.num_indexed - start
            if text.num_indexed == len(text.token_ids):
                self._behind.popleft()


def _longest(
    text: Text, place: int, occurrences: Iterator[tuple[Text, int]]
) -> tuple[list[tuple[Text, int]], int]:
    """Return those occurrences that agree furthest back with a text before a place, and how far."""
    token_ids = text.token_ids
    found: list[tuple[Text, int]] = []
    longest = 0
    for other, end in occurrences:
        others = other.token_ids
        if end >= len(others):
            continue  # nothing follows
        most, length = min(place, end, DEEPEST), NGRAM
        while length < most and token_ids[place - length - 1] == others[end - length - 1]:
            length += 1
        if length > longest:
            found, longest = [], length
        if length == longest:
            found.append((other, end))
    return found, longest


def _following(text: Text, end: int, count: int, own: Text) -> list[int]:
    """Return at most `count` tokens behind a place; `own`, where it ends, goes on from itself."""
    token_ids = text.token_ids
    rest = token_ids[end : end + count].tolist()
    if text is own:
        period = len(token_ids) - end
        while len(rest) < count:
            rest.append(rest[len(rest) - period])
    return rest


def _vote(voters: list[list[int]]) -> tuple[list[int], list[float]]:
    """Return drafts, at each place what most voters say that said all before, and their shares.

    The first of equals counts: the sequence itself, then what ended last.
    """
    drafts: list[int] = []
    chances: list[float] = []
    while voters:
        number, first = len(drafts), voters[0]
        if voters.count(first) == len(voters):
            drafts += first[number:]
            chances += [1.0] * (len(drafts) - number)
            break
        votes: dict[int, int] = {}
        num_votes = 0
        for voter in voters:
            if number < len(voter):
                votes[voter[number]] = votes.get(voter[number], 0) + 1
                num_votes += 1
        if not votes:
            break
        best = max(votes, key=votes.__getitem__)
        voters = [voter for voter in voters if number < len(voter) and voter[number] == best]
        drafts.append(best)
        chances.append(votes[best] / num_votes)
    return drafts, chances
