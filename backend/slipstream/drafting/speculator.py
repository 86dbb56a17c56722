"""Decide whose drafts are verified, and how many: as many as pay, none if none does.

A sequence with drafts cannot run ahead: its next rows need the token in flight. So before it gets
any, its drafter is judged by what it would have proposed: of each sequence one draft is noted and
compared with the token that came. A sequence whose drafts were mostly right stops running ahead,
and speculates; one whose drafts were wrong, or that has none, runs ahead again.

How many drafts a step gets: a draft is right if all before it were, so number j of a sequence whose
drafts are right with probability p is worth p^j tokens. Drafts are taken by falling worth for as
long as tokens per second rise, by measured times of steps (`costs.py`); if that is no more than
without drafts, there are none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.core.batch import Batch
from slipstream.core.draft_state import DraftState
from slipstream.core.drafts import Drafter
from slipstream.core.edits import counts_tokens
from slipstream.core.sequence import Sequence
from slipstream.drafting.costs import StepTimes

_START = 0.3  # of drafts that are right, before any was judged
_SHARE = 0.15  # of the last draft in the mean
_MIN_RIGHT = 0.5  # of drafts, for a sequence to stop running ahead
_MAX_SEQUENCES = 64  # of a step with drafts: beyond, rows cost as much as they bring
_GAIN = 1.05  # of tokens per second, for drafts to be verified
_PAUSE = 256  # steps without drafts once they do not pay, unless half of the sequences end


@dataclass(slots=True)
class _Record:
    """What is known of a sequence's drafts."""

    right: float = _START  # mean of drafts that were right
    place: int = 0  # number of known tokens at which `guess` would be the next
    guess: int = -1  # -1: none


class Speculator:
    """The drafts of one engine's sequences; a `Speculation`.

    Args:
        drafter: makes them.
        max_drafts: of a sequence in a step.
        times: of steps; None: measured from now on.
    """

    def __init__(self, drafter: Drafter, max_drafts: int, times: StepTimes | None = None) -> None:
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._times = times or StepTimes()
        self._records: dict[int, _Record] = {}
        self._pause = 0  # steps without drafts that are left, as they did not pay
        self._paused_at = 0  # sequences of the step at which they did not
        self.counters = dict.fromkeys(("drafts", "drafted_tokens", "accepted_tokens"), 0)
        self.accepted_by_position = [0] * max_drafts

    def propose(
        self, decodes: list[Sequence], max_drafts: int
    ) -> Iterator[tuple[Sequence, list[int]]]:
        """Return the drafts that pay; see `Speculation`."""
        if 2 * len(decodes) <= self._paused_at:
            self._pause = 0
        self._pause = max(0, self._pause - 1)
        if len(decodes) > _MAX_SEQUENCES or self._pause:
            for sequence in decodes:
                sequence.is_speculating = False
            return
        found: list[tuple[Sequence, list[int], float]] = []
        for sequence in decodes:
            drafts, right = self._look(sequence)
            if sequence.is_speculating and not sequence.num_pending and drafts:
                found.append((sequence, drafts, right))
        if not found:
            return
        counts = self._choose(len(decodes), [(d, p) for _, d, p in found], max_drafts)
        if not any(counts):
            self._pause, self._paused_at = _PAUSE, len(decodes)
            for sequence in decodes:
                sequence.is_speculating = False
            return
        for (sequence, drafts, _), count in zip(found, counts, strict=True):
            if count:
                yield sequence, drafts[:count]

    def _look(self, sequence: Sequence) -> tuple[list[int], float]:
        """Judge the last guess, make the next; return drafts and how likely each is right."""
        record = self._records.get(sequence.id)
        if record is None:
            if not _can_have_drafts(sequence):
                return [], 0.0
            record = self._records[sequence.id] = _Record()
        known = sequence.num_known
        if record.guess >= 0 and known > record.place:
            is_right = sequence.outputs[record.place - sequence.num_prompt] == record.guess
            record.right += _SHARE * (is_right - record.right)
            record.guess = -1
        drafts = self._drafter.propose(sequence, self._max_drafts) if sequence.outputs else []
        if drafts:
            record.place, record.guess = known, drafts[0]
        sequence.is_speculating = bool(drafts) and record.right >= _MIN_RIGHT
        return drafts, record.right

    def _choose(
        self, num_rows: int, found: list[tuple[list[int], float]], max_drafts: int
    ) -> list[int]:
        """Return how many drafts of each to verify."""
        plain_ns = self._times.of(num_rows, False)
        counts = [0] * len(found)
        if plain_ns is None:
            return counts
        worth = sorted(
            (
                (-(right ** (j + 1)), number)
                for number, (drafts, right) in enumerate(found)
                for j in range(len(drafts))
            ),
        )[:max_drafts]
        num_tokens, best, num_best = float(num_rows), _GAIN * num_rows / plain_ns, 0
        for count, (negative, _) in enumerate(worth, start=1):
            num_tokens -= negative
            took_ns = self._times.of(num_rows + count, True)
            rate = 0.0 if took_ns is None else num_tokens / took_ns
            if rate > best:
                best, num_best = rate, count
        for _, number in worth[:num_best]:
            counts[number] += 1
        return counts

    def verified(self, sequence: Sequence, num_drafts: int, num_right: int, num_wrong: int) -> None:
        """Count a sequence's drafts; see `Speculation`."""
        state = sequence.draft
        if state is None:
            state = sequence.draft = DraftState()
        state.num_drafted += num_drafts
        state.num_accepted += num_right
        self.counters["drafts"] += 1
        self.counters["drafted_tokens"] += num_drafts
        self.counters["accepted_tokens"] += num_right
        for position in range(num_right):
            self.accepted_by_position[position] += 1
        record = self._records.get(sequence.id)
        if record is not None:
            for is_right in [True] * num_right + [False] * num_wrong:
                record.right += _SHARE * (is_right - record.right)
            record.guess = -1  # it is judged

    def step_took(self, batch: Batch, took_ns: int) -> None:
        """Note the time of a step of decodes alone."""
        if batch.num_decodes == len(batch.rows):
            self._times.add(len(batch.rows), batch.num_drafts > 0, took_ns)

    def release(self, sequence: Sequence) -> None:
        """Discard what is known of a sequence, which has ended."""
        if self._records.pop(sequence.id, None) is not None:
            self._drafter.release(sequence)


def _can_have_drafts(sequence: Sequence) -> bool:
    """Return whether drafts can be verified: penalties count each token before the next sample."""
    sampling = sequence.sampling
    is_probe = sequence.request.message.is_probe
    return not (counts_tokens(sampling) or sampling.beams is not None or is_probe)
