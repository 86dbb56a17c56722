"""Drafts that requests bring or ask for, beside those that an engine's own speculation makes.

A client's drafts are guesses of the first outputs. They are proposed for as long as all outputs are
what the client guessed; the first other output makes the rest worthless. An engine that makes
drafts itself honours the number that a request asks for; for one that does not, prompt lookup makes
them, while at least half of a sequence's drafts are right.

The sequences that ask wait for their tokens, and only while there is something to verify. All
others run ahead as ever, and where none asks nothing is done.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from slipstream_contract.limits import MAX_CLIENT_DRAFTS, MAX_DRAFT_TOKENS

from slipstream.core.batch import Batch
from slipstream.core.draft_state import DraftState
from slipstream.core.drafts import Speculation, most_drafts, sequence_can_have_drafts
from slipstream.core.guided import needs_all_masks
from slipstream.core.sequence import Sequence, SequenceStatus
from slipstream.drafting.lookup import PromptLookup

_MIN_RIGHT = 0.5  # of a sequence's drafts, for any to be verified
_START, _WEIGHT = 0.6, 4.0  # of drafts that are right, before any was; judged drafts it counts as
_FADE = 0.95  # of what was judged, for each draft or run of drafts more


@dataclass(slots=True)
class _Asked:
    """What one sequence asks for."""

    sequence: Sequence
    given: tuple[int, ...]  # the client's; empty: none, or no longer worth anything
    looks_up: bool
    num_seen: int = 0  # outputs that were compared, with `given` or with `guess`
    drafts: list[int] = field(default_factory=list)  # of what follows the pending tokens, if any
    guess: int = -1  # of the output `num_seen`; -1: none
    num_judged: float = _WEIGHT
    num_right: float = _WEIGHT * _START

    def judge(self, num_right: int, num_wrong: int) -> None:
        """Note what became of drafts, or of a guess."""
        self.guess = -1
        if num_right + num_wrong:
            self.num_judged = _FADE * self.num_judged + num_right + num_wrong
            self.num_right = _FADE * self.num_right + num_right


class AskedDrafts:
    """The drafts of one engine; a `Speculation` around its own, if it has any."""

    def __init__(self, own: Speculation | None) -> None:
        self._own = own
        self.accepted = None if own is None else own.accepted
        self._asked: dict[int, _Asked] = {}  # by sequence id
        self._lookup = PromptLookup()

    @property
    def is_active(self) -> bool:
        """Whether any sequence may get drafts."""
        return self._own is not None or bool(self._asked)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Take in the new sequences of a request that says something of drafts."""
        for sequence in sequences:
            drafts = sequence.sampling.drafts
            assert drafts is not None, "it asks for nothing"
            sequence.draft = DraftState(given=drafts.token_ids)
            looks_up = self._own is None and bool(drafts.most)
            given = () if drafts.most == 0 else drafts.token_ids
            is_verified = self.accepted is None and _can_have_drafts(sequence)
            if is_verified and (given or looks_up):
                self._asked[sequence.id] = _Asked(sequence, given, looks_up)

    def update(self, has_room: bool) -> None:
        """Find the drafts of the sequences that ask, before a step is scheduled.

        Those for which there are any wait for their tokens, if a step `has_room` for drafts. Those
        whose drafts are in flight are left alone.
        """
        for asked in list(self._asked.values()):
            sequence = asked.sequence
            if sequence.status is SequenceStatus.RUNNING and sequence.num_pending <= 1:
                self._find(asked)
                sequence.is_speculating = has_room and bool(asked.drafts)

    def _find(self, asked: _Asked) -> None:
        """Compare new outputs with what was guessed, and set the drafts of what follows."""
        sequence, start = asked.sequence, asked.num_seen
        num_known = asked.num_seen = len(sequence.outputs)
        if asked.given:
            is_right = asked.given[start:num_known] == tuple(sequence.outputs[start:num_known])
            if is_right and num_known < len(asked.given):
                most = most_drafts(sequence, MAX_CLIENT_DRAFTS)
                first = num_known + sequence.num_pending
                asked.drafts = list(asked.given[first : first + most])
                self._state(sequence).is_given = True
                return
            asked.given, asked.drafts = (), []
            self._state(sequence).is_given = False
            if not asked.looks_up:
                del self._asked[sequence.id]
                return
        if num_known > start:
            if asked.guess >= 0:
                is_right = sequence.outputs[start] == asked.guess
                asked.judge(int(is_right), int(not is_right))
            most = most_drafts(sequence, MAX_DRAFT_TOKENS)
            found = self._lookup.propose(sequence, most).token_ids
            asked.guess = found[0] if found else -1
            is_worth = asked.num_right >= _MIN_RIGHT * asked.num_judged
            asked.drafts = found if is_worth else []

    @staticmethod
    def _state(sequence: Sequence) -> DraftState:
        assert sequence.draft is not None, "made when it was added"
        return sequence.draft

    def propose(
        self, decodes: list[Sequence], max_drafts: int
    ) -> Iterator[tuple[Sequence, list[int]]]:
        """Return the drafts of those that ask, then those of the engine's own speculation."""
        others = decodes
        if self._asked:
            others = []
            for sequence in decodes:
                asked = self._asked.get(sequence.id)
                if asked is None or not sequence.is_speculating:
                    others.append(sequence)
                elif not sequence.num_pending and max_drafts:
                    drafts = asked.drafts[:max_drafts]
                    max_drafts -= len(drafts)
                    yield sequence, drafts
        if self._own is not None:
            yield from self._own.propose(others, max_drafts)

    def verified(self, sequence: Sequence, num_drafts: int, num_right: int, num_wrong: int) -> str:
        """Note what became of drafts; a client's are counted with the output, at its end."""
        state = sequence.draft
        if state is not None and state.is_given:
            return "client"
        if self._own is not None:
            return self._own.verified(sequence, num_drafts, num_right, num_wrong)
        assert state is not None, "a draft that nobody asked for"
        state.num_drafted += num_drafts
        state.num_accepted += num_right
        if (asked := self._asked.get(sequence.id)) is not None:
            asked.judge(num_right, num_wrong)
        return "lookup"

    def step_took(self, batch: Batch, took_ns: int) -> None:
        """Note how long a step took; see `Speculation`."""
        if self._own is not None:
            self._own.step_took(batch, took_ns)

    def release(self, sequence: Sequence) -> None:
        """Discard what is held of a sequence, which has ended."""
        if self._asked.pop(sequence.id, None) is not None:
            self._lookup.release(sequence)
        if self._own is not None:
            self._own.release(sequence)


def _can_have_drafts(sequence: Sequence) -> bool:
    """Return whether rows of drafts can be sampled; a mask is of one row."""
    sampling = sequence.sampling
    has_masks = sampling.guide is not None and needs_all_masks(sampling)
    return sequence_can_have_drafts(sequence) and not has_masks
