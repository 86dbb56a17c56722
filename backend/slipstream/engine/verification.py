"""Put drafts into a step and apply what became of them: see `core/drafts.py`.

No sequence is preempted for drafts, and blocks that only rejected ones needed go back at once.
"""

from collections.abc import Callable, Iterable

from slipstream.core.batch import Outcome, Row, Sampled
from slipstream.core.drafts import Speculation, is_right
from slipstream.core.sequence import Sequence, SequenceStatus
from slipstream.drafting.asked import AskedDrafts
from slipstream.drafting.counts import DraftCounts
from slipstream.engine.beam_group import Beam
from slipstream.engine.telemetry import Telemetry
from slipstream.kvcache.cache import KVCache

Result = tuple[Sequence | None, int, float, int]  # and a token, its log prob, its outcome
Append = Callable[[Iterable[Result], int], None]


class Verification:
    """The drafts of one scheduler's steps, at most `max_rows` rows of a step with its decodes."""

    def __init__(
        self, speculation: Speculation | None, cache: KVCache, telemetry: Telemetry, max_rows: int
    ) -> None:
        self._speculation = asked = AskedDrafts(speculation)
        self.counts = DraftCounts()
        self._cache = cache
        self._telemetry = telemetry
        self._max_rows = max_rows
        self.add, self.release, self.step_took = asked.add, asked.release, asked.step_took

    @property
    def is_active(self) -> bool:
        """Whether any sequence may get drafts; else there is nothing to do before a step."""
        return self._speculation.is_active

    def update(self, num_running: int) -> None:
        """Find the drafts that requests ask for, before a step is scheduled."""
        self._speculation.update(num_running < self._max_rows)

    def add_drafts(
        self, decodes: list[Sequence], budget: int, num_chunks: int, num_running: int
    ) -> bool:
        """Give decodes their drafts, as many as fit; return whether there are any.

        Args:
            decodes: of a step.
            budget: tokens that the step can still take.
            num_chunks: of the step, each of which may sample.
            num_running: sequences that hold blocks.
        """
        room = max(0, min(budget, self._max_rows - len(decodes) - num_chunks))
        has_drafts = False
        # The next tokens of beams depend on all beams: there is nothing to guess.
        takers = [sequence for sequence in decodes if not isinstance(sequence, Beam)]
        for sequence, proposed in self._speculation.propose(takers, room):
            assert not sequence.num_pending, "drafts after an unknown token"
            if sequence.guide is not None and sequence.guide.needs_all:
                continue  # its mask is of one row; others validate what they sample without
            most = sequence.num_final - sequence.num_tokens - 1  # the last token needs no draft
            count = max(0, min(len(proposed), most))
            while sequence.num_tokens + count > sequence.cache.capacity:
                if not self._grow(sequence, num_running):
                    count = sequence.cache.capacity - sequence.num_tokens
            sequence.drafts = proposed[:count]
            has_drafts |= count > 0
        return has_drafts

    def _grow(self, sequence: Sequence, num_running: int) -> bool:
        """Add room for one more block of tokens if every running sequence could do the same."""
        tables = self._cache.shortest_tables(sequence)
        num_spare = num_running * self._cache.window.num_tables
        can_grow = self._cache.num_free >= len(tables) + num_spare
        if can_grow:
            self._cache.grow(sequence, tables)
        return can_grow

    def commit(
        self,
        sequence: Sequence,
        rows: tuple[Row, ...],
        sampled: Sampled,
        now: int,
        append: Append,
    ) -> None:
        """Apply the rows of a sequence for as long as the drafts in them are right.

        Args:
            sequence: their sequence.
            rows: of the last known token, then of each draft.
            sampled: the samples of these rows.
            now: `time.monotonic_ns()`.
            append: gives sequences their samples.
        """
        num_right = num_wrong = 0
        num_drafts, token_ids = len(rows) - 1, sampled.token_ids
        if self._speculation.accepted is not None:
            count = self._speculation.accepted(sequence, num_drafts)
            token_ids = [row.token_ids[0] for row in rows[1 : count + 1]] + token_ids[count:]
            rows = rows[: count + 1]
        results = zip(token_ids, sampled.log_probs, sampled.outcomes, strict=True)
        for row, (token_id, log_prob, outcome) in zip(rows, results, strict=False):
            if sequence.status is SequenceStatus.FINISHED:
                break
            if row is not rows[0]:
                if not is_right(sequence, row):
                    sequence.rewind()
                    num_wrong = 1
                    break
                num_right += 1
            self._telemetry.tokens_sampled([sequence], now)
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_computed = row.start + 1
            append([(sequence, token_id, log_prob, outcome_of(sequence, row, outcome))], now)
        is_over = sequence.status is SequenceStatus.FINISHED
        if num_right == len(rows) - 1 < num_drafts and not is_over:  # the next is not accepted
            num_wrong = 1
            sequence.rewind()
        drafter = self._speculation.verified(sequence, num_drafts, num_right, num_wrong)
        self.counts.add(drafter, num_drafts, num_right)
        if sequence.status is SequenceStatus.RUNNING:
            self._cache.give_back(sequence)


def outcome_of(sequence: Sequence, row: Row, outcome: int) -> int:
    """Return the outcome of a row, which tells whether a guided sample had its mask."""
    is_open = sequence.guide is not None and row.mask is None
    return Outcome.UNMASKED if is_open and outcome == Outcome.SAMPLED else outcome
