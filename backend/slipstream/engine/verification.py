"""Put drafts into a step and apply what became of them: see `core/drafts.py`.

No sequence is preempted for drafts, and blocks that only rejected ones needed go back at once.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many

from slipstream.core.batch import Batch, Outcome, Row, Sampled
from slipstream.core.drafts import Speculation, is_right
from slipstream.core.sequence import Sequence, SequenceStatus
from slipstream.drafting.asked import AskedDrafts
from slipstream.drafting.counts import DraftCounts
from slipstream.engine.beam_group import Beam
from slipstream.engine.guides import Result
from slipstream.engine.telemetry import Telemetry
from slipstream.kvcache.cache import KVCache

AppendAll = Callable[[Iterable[Result], int], None]


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
            if sequence.guide is not None and not sequence.guide.carry(proposed):
                continue  # a row would lack its mask
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
        drafted: Many[tuple[Sequence, slice]],
        batch: Batch,
        sampled: Sampled,
        now: int,
        append: AppendAll,
    ) -> None:
        """Apply the rows of sequences for as long as the drafts in them are right.

        Args:
            drafted: sequences, and the rows of each: of its last known token, then of drafts.
            batch: the step.
            sampled: its samples.
            now: `time.monotonic_ns()`.
            append: gives sequences their samples, each before it takes the next one.
        """
        running = [s for s, _ in drafted if s.status is not SequenceStatus.FINISHED]
        self._telemetry.tokens_sampled(running, now)
        more: list[Sequence] = []  # of each token beyond the first of its sequence
        append(self._all_results(drafted, batch, sampled, more), now)
        self._telemetry.tokens_sampled(more, now)

    def _all_results(
        self,
        drafted: Many[tuple[Sequence, slice]],
        batch: Batch,
        sampled: Sampled,
        more: list[Sequence],
    ) -> Iterator[Result]:
        """Yield the results of rows whose tokens the sequences have; then note how it went."""
        for sequence, numbers in drafted:
            rows, own = batch.rows[numbers], sampled.part(numbers)
            num_drafts, num_before = len(rows) - 1, len(more)
            token_ids = own.token_ids
            if self._speculation.accepted is not None:
                count = self._speculation.accepted(sequence, num_drafts)
                token_ids = [row.token_ids[0] for row in rows[1 : count + 1]] + token_ids[count:]
                rows = rows[: count + 1]
            results = zip(token_ids, own.log_probs, own.outcomes, strict=True)
            yield from self._results(sequence, rows, results, more)
            num_right = len(more) - num_before
            is_over = sequence.status is SequenceStatus.FINISHED
            num_wrong = int(num_right < num_drafts and not is_over)
            if num_wrong:
                sequence.rewind()
            drafter = self._speculation.verified(sequence, num_drafts, num_right, num_wrong)
            self.counts.add(drafter, num_drafts, num_right)
            if sequence.status is SequenceStatus.RUNNING:
                self._cache.give_back(sequence)

    @staticmethod
    def _results(
        sequence: Sequence,
        rows: tuple[Row, ...],
        results: Iterable[tuple[int, float, int]],
        more: list[Sequence],
    ) -> Iterator[Result]:
        """Yield the results of a sequence's rows up to the first draft that is wrong."""
        for number, (row, result) in enumerate(zip(rows, results, strict=False)):
            if sequence.status is SequenceStatus.FINISHED or (
                number and not is_right(sequence, row)
            ):
                break
            if number:
                more.append(sequence)
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_computed = row.start + 1
            token_id, log_prob, outcome = result
            yield sequence, token_id, log_prob, outcome_of(sequence, row, outcome)


def outcome_of(sequence: Sequence | None, row: Row, outcome: int) -> int:
    """Return the outcome of a row, which tells whether a guided sample had its mask."""
    guide = None if sequence is None else sequence.guide
    is_open = guide is not None and row.mask is None and not guide.needs_all
    return Outcome.UNMASKED if is_open and outcome == Outcome.SAMPLED else outcome
