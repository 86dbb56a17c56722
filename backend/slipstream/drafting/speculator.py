"""Decide whether drafts are verified, and how many: as many as pay, none if none does.

A step with drafts cannot be launched ahead: its rows need the tokens in flight. So before there are
any, the drafter is judged by what it would have proposed: of each sequence one draft is noted and
compared with the token that came. Once drafts should pay, all sequences wait for their tokens and
share one step, those without drafts too: sequences that took turns would read the weights twice.

How many drafts a step gets: a draft is right if all before it were, so number j of a sequence whose
drafts are right with probability p is worth p^j tokens. Drafts are taken by falling worth for as
long as tokens per second rise, by measured times of steps (`costs.py`), which include what waiting
for the host costs; if that is no more than without drafts, there are none, and all run ahead again.
"""

from collections.abc import Callable, Iterator
from time import monotonic_ns

from slipstream.core.batch import Batch
from slipstream.core.draft_state import DraftState
from slipstream.core.drafts import Accepted, Drafter, most_drafts, sequence_can_have_drafts
from slipstream.core.sequence import Sequence
from slipstream.drafting.costs import StepTimes
from slipstream.drafting.judged import Learning, Record

_MIN_RIGHT = 0.5  # of a sequence's drafts, for any to be verified
_MAX_SEQUENCES = 64  # of a step with drafts: beyond, rows cost as much as they bring
_GAIN = 1.05  # of tokens per second, for drafts to be verified from now on
_GAIN_ON = 1.0  # and for as long as they are
_FORGET = 512  # steps after which times that spoke against drafts are measured anew


class Speculator:
    """The drafts of one engine's sequences; a `Speculation`.

    Args:
        drafter: makes them.
        max_drafts: of a sequence in a step.
        times: of steps; None: measured from now on.
        clock: in ns.
        accepted: of load tests, see `Speculation`.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        times: StepTimes | None = None,
        clock: Callable[[], int] = monotonic_ns,
        accepted: Accepted | None = None,
    ) -> None:
        self.accepted = accepted
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._times = times or StepTimes()
        self._records: dict[int, Record] = {}
        self._learning = Learning()
        self._clock, self._ended_ns = clock, 0
        self._is_on = False  # all wait for their tokens
        self._num_refused = 0  # steps in which drafts would have cost more than they bring

    def propose(
        self, decodes: list[Sequence], max_drafts: int
    ) -> Iterator[tuple[Sequence, list[int]]]:
        """Return the drafts that pay; see `Speculation`."""
        may_have_some = len(decodes) <= _MAX_SEQUENCES
        looked = [(s, *self._look(s)) for s in decodes] if may_have_some else []
        if self._is_on and not any(sequence.is_speculating for sequence in decodes):
            for sequence in decodes:  # new ones, beside those that wait: they join them
                sequence.is_speculating = True
            return
        found = [item for item in looked if item[2] and item[2][0] >= _MIN_RIGHT]
        counts: list[int] = []
        if found:
            counts = self._choose(len(decodes), [item[2] for item in found], max_drafts)
            if not any(counts):
                self._num_refused += 1
                if self._num_refused % _FORGET == 0:
                    self._times.release_drafts()
        self._is_on = any(counts)
        for sequence in decodes:
            sequence.is_speculating = self._is_on
        if any(sequence.num_pending for sequence in decodes):
            return  # the next step has them all, with drafts
        for (sequence, drafts, _), count in zip(found, counts, strict=False):
            if count:
                self._note_drafter(sequence)
                yield sequence, drafts[:count]

    def _note_drafter(self, sequence: Sequence) -> None:
        """Note whose drafts a sequence has in the next step."""
        if sequence.draft is None:
            sequence.draft = DraftState()
        proposal = self._records[sequence.id].proposal
        assert proposal is not None, "drafts that were not proposed"
        sequence.draft.drafter = proposal.drafter

    def _look(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """Judge the last guess, make the next; return drafts and how likely each survives."""
        record = self._records.get(sequence.id)
        if record is None:
            if not _can_have_drafts(sequence):
                return [], []
            record = self._records[sequence.id] = Record()
        known, last = sequence.num_known, record.proposal
        if last is not None and 0 <= record.place < known:
            is_right = sequence.outputs[record.place - sequence.num_prompt] == last.token_ids[0]
            self._learning.judge(record, int(is_right), int(not is_right))
        most = most_drafts(sequence, self._max_drafts)
        if not (most and sequence.outputs):
            return [], []
        proposal = self._drafter.propose(sequence, most)
        if not proposal.token_ids:
            return [], []
        record.proposal, record.place = proposal, known
        return proposal.token_ids, self._learning.survival(record, proposal)

    def _choose(self, num_rows: int, found: list[list[float]], max_drafts: int) -> list[int]:
        """Return how many drafts of each to verify, by how likely these survive."""
        plain_ns = self._times.of(num_rows, False)
        counts = [0] * len(found)
        if plain_ns is None:
            return counts
        worth = sorted(
            ((-likely, number) for number, survival in enumerate(found) for likely in survival),
        )[:max_drafts]
        gain = _GAIN_ON if self._is_on else _GAIN
        num_tokens, best, num_best = float(num_rows), gain * num_rows / plain_ns, 0
        for count, (negative, _) in enumerate(worth, start=1):
            num_tokens -= negative
            took_ns = self._times.of(num_rows + count, True)
            rate = 0.0 if took_ns is None else num_tokens / took_ns
            if rate > best:
                best, num_best = rate, count
        for _, number in worth[:num_best]:
            counts[number] += 1
        return counts

    def verified(self, sequence: Sequence, num_drafts: int, num_right: int, num_wrong: int) -> str:
        """Count a sequence's drafts; see `Speculation`."""
        state = sequence.draft
        assert state is not None, "drafts that were not proposed"
        state.num_drafted += num_drafts
        state.num_accepted += num_right
        record = self._records.get(sequence.id)
        if record is not None:  # else it has ended
            self._learning.judge(record, num_right, num_wrong)
        return state.drafter

    def step_took(self, batch: Batch, took_ns: int) -> None:
        """Note the time of a step of decodes alone; with drafts, since the step before it ended.

        So it includes the host's work between the two, which steps that run ahead hide.
        """
        now_ns = self._clock()
        since_ns, self._ended_ns = now_ns - self._ended_ns, now_ns
        if batch.num_drafts:
            took_ns = max(took_ns, min(since_ns, 2 * took_ns))  # more: the engine was idle
        if batch.num_decodes == len(batch.rows):
            self._times.add(len(batch.rows), batch.num_drafts > 0, took_ns)

    def release(self, sequence: Sequence) -> None:
        """Discard what is known of a sequence, which has ended."""
        if self._records.pop(sequence.id, None) is not None:
            self._drafter.release(sequence)


def _can_have_drafts(sequence: Sequence) -> bool:
    return sequence_can_have_drafts(sequence) and not sequence.request.message.is_probe
