"""Drafts that the device makes right behind a step's samples: asked for by rows, kept till used.

A chain of drafts costs a pass of the drafter each, verified or not, so it is made where it is used.
While drafts are verified, rows ask for whole chains. Before, they ask for one draft, which is
compared with the token that comes: the drafter listens. If too few are right, or nothing is
verified for long, the drafter sleeps for some steps, and steps of decodes cost what they cost
without it; then it listens again, and sleeps twice as long if that was in vain. A drafter that was
mostly wrong is probed first: one step asks, and if too few of its drafts are right, it sleeps on. A
draft model of 16 layers takes some 6 ms of a step, so three such steps would be 2 % of a request.

A drafter with a cache misses the tokens of steps that it sleeps through. Sequences that ran then
ask for nothing more, as their drafts would be wrong.
"""

from collections.abc import Sequence as Many

from msgspec.structs import replace

from slipstream.core.batch import Batch, Row, Sampled
from slipstream.core.drafts import Proposal, can_have_drafts
from slipstream.core.sequence import Sequence, SequenceStatus

_MAX_ROWS = 64  # of a step that asks: beyond, rows of drafts cost as much as they bring
_ENOUGH = 12  # judged drafts, to see that too few are right
_LISTEN = 16  # steps that ask, without a draft that is verified
_RIGHT = 0.4  # of the judged, for listening to go on; for whole chains a little more
_SLEEP, _MAX_SLEEP = 128, 4096  # steps


class Wakefulness:
    """Whether rows ask for no draft, one or whole chains."""

    def __init__(self) -> None:
        """Start with listening."""
        self._num_asked = self._num_judged = self._num_right = 0  # steps; drafts
        self._num_asleep = 0  # steps to sleep from now on
        self._next_sleep = _SLEEP
        self._is_probing = False  # too few were right before: the next step that asks is a probe
        self._num_awaited = 0  # drafts of a probe that are not judged yet
        self._num_rows = 0  # of the newest step that asked
        self._wakes_at = 0  # rows of a step, or fewer: drafts that did not pay may pay there

    def count(self, most: int, num_rows: int, is_on: bool) -> int:
        """Return how many drafts each row of the next step may ask for.

        Args:
            most: of a chain.
            num_rows: that sample.
            is_on: drafts of this drafter are verified.
        """
        if is_on:
            self._num_asked = self._num_judged = self._num_right = self._num_awaited = 0
            self._next_sleep, self._is_probing = _SLEEP, False
        elif self._num_asleep and num_rows > self._wakes_at:
            self._num_asleep -= 1
            return 0
        self._num_asleep, self._num_rows = 0, num_rows
        is_hopeful = self._num_judged >= 4 and 2 * self._num_right >= self._num_judged
        return most if is_on or is_hopeful else min(most, 1)

    def ask(self, num_rows: int) -> None:
        """Note a step in which so many rows ask. Behind a probe the drafter sleeps."""
        self._num_asked += 1
        if self._is_probing:
            self._sleep(wakes_at=0)
            self._num_awaited = min(num_rows, _ENOUGH)

    def judge(self, is_right: bool) -> None:
        """Note what became of a draft that was not verified."""
        if self._num_asleep and not self._num_awaited:
            return  # it was made before
        self._num_judged += 1
        self._num_right += is_right
        if self._num_awaited:
            self._judge_probe()
            return
        is_bad = self._num_judged >= _ENOUGH and self._num_right < _RIGHT * self._num_judged
        if is_bad or self._num_asked >= _LISTEN:
            self._is_probing = is_bad
            self._sleep(wakes_at=0 if is_bad else self._num_rows // 2)

    def _judge_probe(self) -> None:
        """Wake if enough of a probe's drafts are right."""
        self._num_awaited -= 1
        if not self._num_awaited:
            if self._num_right >= _RIGHT * self._num_judged:
                self._num_asleep, self._is_probing = 0, False
            self._num_judged = self._num_right = 0

    def _sleep(self, wakes_at: int) -> None:
        self._num_asked = self._num_judged = self._num_right = self._num_awaited = 0
        self._num_asleep, self._wakes_at = self._next_sleep, wakes_at
        self._next_sleep = min(2 * self._next_sleep, _MAX_SLEEP)


class DeviceDrafts:
    """The newest drafts of each sequence; a `Drafter`.

    Args:
        name: of the drafter on the device.
        max_drafts: of a sequence in a step.
        has_cache: of tokens, which it has to see all of.
    """

    def __init__(self, name: str, max_drafts: int, has_cache: bool = True) -> None:
        self._name = name
        self._max_drafts = max_drafts
        self._has_cache = has_cache
        self._wakefulness = Wakefulness()
        self._left_behind = -1  # the newest sequence of which a token was missed
        self._found: dict[int, tuple[int, list[int]]] = {}  # number of tokens before; drafts

    def ask(self, rows: list[Row], decodes: Many[Sequence], has_chunks: bool) -> list[Row]:
        """Return the rows of a step, which now ask for drafts where these are of use.

        Args:
            rows: of the step; those of `decodes` come first.
            decodes: sequences of which the step computes one token, and drafts of it.
            has_chunks: prompts too; the drafter follows these, as others find their blocks.
        """
        num_samples = sum([row.samples for row in rows])
        if num_samples > _MAX_ROWS:
            self._leave_behind(rows, has_chunks)
            return rows
        is_on = self._is_on(decodes)
        count = self._wakefulness.count(self._max_drafts, num_samples, is_on)
        able = [row for row in rows if row.samples and can_have_drafts(row.sampling)]
        asking = {id(row) for row in able if self._has_all(row)} if count else ()
        if not asking:
            self._leave_behind(able, has_chunks)
            return rows
        self._wakefulness.ask(len(asking))
        return [replace(row, num_drafts=count) if id(row) in asking else row for row in rows]

    def _leave_behind(self, rows: list[Row], has_chunks: bool) -> None:
        """Note a step that asks for nothing, by those of its rows that might have asked."""
        if self._has_cache and not has_chunks:
            newest = max([row.sequence_id for row in rows], default=-1)
            self._left_behind = max(newest, self._left_behind)

    def _is_on(self, decodes: Many[Sequence]) -> bool:
        """Return whether drafts of this drafter are verified; others make drafts, too."""
        return any(
            sequence.is_speculating
            and sequence.draft is not None
            and sequence.draft.drafter == self._name
            for sequence in decodes
        )

    def _has_all(self, row: Row) -> bool:
        """Return whether the drafter saw all tokens of a row's sequence."""
        return not self._has_cache or row.sequence_id > self._left_behind

    def take(self, batch: Batch, samplers: Many[Sequence | None], sampled: Sampled) -> None:
        """Judge the drafts of the step before by a step's samples, and keep those of this one."""
        rows = [row for row in batch.rows if row.samples]
        if not batch.num_drafts:
            self._judge(rows, sampled.token_ids)
        for number, found in sampled.drafts.items():
            sequence, row = samplers[number], rows[number]
            if sequence is not None and sequence.status is not SequenceStatus.FINISHED:
                num_known = row.num_prompt + row.num_outputs + 1
                self._found[sequence.id] = (num_known, found)

    def _judge(self, rows: list[Row], token_ids: list[int]) -> None:
        """Compare the samples of rows with the drafts of them, none of which was verified."""
        for row, token_id in zip(rows, token_ids, strict=True):
            num_known, drafts = self._found.get(row.sequence_id, (-1, []))
            if drafts and num_known == row.num_prompt + row.num_outputs:
                self._wakefulness.judge(drafts[0] == token_id)

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return at most `k` drafts of what follows the known tokens, if the last step made any."""
        num_known, drafts = self._found.get(sequence.id, (-1, []))
        return Proposal(drafts[:k] if num_known == sequence.num_known else [], self._name)

    def release(self, sequence: Sequence) -> None:
        """Discard the drafts of a sequence, which has ended."""
        self._found.pop(sequence.id, None)
