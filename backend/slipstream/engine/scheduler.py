"""Decide what the next step computes: decodes first, then prefill chunks within the token limit.

A running sequence with one token left to compute is a decode; with more (a new prompt, or the whole
sequence after a preemption) it is computed in chunks. Beside decodes, chunks of long prompts are
limited by the prefill budget. Scheduling a step costs O(sequences), not O(tokens).

Running sequences hold blocks (`running_set.py`: which is preempted when there are too few); others
wait until they are admitted (`admission.py`). Siblings (n > 1) are deferred until the first of them
has computed the prompt. A leader that stops running wakes the sequences that it deferred: none
waits for a sequence that does not run.

A step may be scheduled while the one before it runs, whose tokens are then known by number only
(`Sequence.num_pending`): a row names its sample. A sequence that turns out to have ended has a row
in flight that is ignored; a sequence that is preempted meanwhile still gets its token.

Drafts take what room decodes and chunks leave: see `verification.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic_ns

from slipstream.core.batch import Batch, Outcome, Row, Sampled, Top
from slipstream.core.drafts import Speculation, take_runs, together
from slipstream.core.rows import chunk_row, decode_row, rows_with_drafts
from slipstream.core.sequence import Request, Sequence, SequenceStatus
from slipstream.core.step_sizes import StepSizes
from slipstream.core.stop import Ending
from slipstream.core.two_way import TwoWay
from slipstream.core.window import AttentionWindow
from slipstream.drafting.counts import DraftCounts
from slipstream.engine.adapter_room import AdapterRoom, waits_for
from slipstream.engine.admission import Admission
from slipstream.engine.beam_group import Beam
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.guides import Append, Guides, Result, error_of
from slipstream.engine.prefill_budget import PrefillBudget
from slipstream.engine.running_set import MAX_PREEMPTIONS, RunningSet
from slipstream.engine.step_draft import StepDraft
from slipstream.engine.step_shares import StepShares, split
from slipstream.engine.telemetry import Telemetry
from slipstream.engine.verification import Verification, outcome_of
from slipstream.engine.waiting import WaitingQueue
from slipstream.kvcache.cache import Copies, KVCache
from slipstream.kvcache.host import Mover
from slipstream.wire import FinishReason

_SAMPLED = int(Outcome.SAMPLED)  # an enumeration compares slowly


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler, from `EngineConfig`."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int = 4096
    max_waiting_tokens: int = 2_097_152
    long_prompt_tokens: int | None = None  # None: by the time that it takes
    kv_cache_reuse: bool = True
    logprobs_mode: str = "raw_logprobs"  # of requests that do not say
    max_logits_bytes: int = 1 << 26  # of one request
    max_num_rows: int = 0  # of a step that has drafts, its decodes included; 0: max_num_seqs
    guide_in_thinking: bool = False  # of requests that do not say
    target_itl_ns: int = 0  # of a step that decodes; 0: by the time of decodes
    num_stages: int = 1  # of a pipeline
    two_way: TwoWay | None = None  # the model's prompts, which are computed whole


class Scheduler:
    """Queues, blocks, and the decision of each step: `schedule`, run the batch, `commit`.

    Steps are committed (or fail) in the order in which they were scheduled. At most one is in
    flight when the next one is scheduled, in a pipeline as many as it has stages but one.
    """

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], int] = monotonic_ns,
        telemetry: Telemetry | None = None,
        window: AttentionWindow | None = None,
        mover: Mover | None = None,
        attention_doubles_at: int = 0,
        step_sizes: StepSizes | None = None,
        speculation: Speculation | None = None,
        device_drafts: DeviceDrafts | None = None,
        room: AdapterRoom | None = None,
    ) -> None:
        bounds = (limits.target_itl_ns, limits.long_prompt_tokens, step_sizes or StepSizes())
        self._prefill_budget = prefill_budget = PrefillBudget(clock, attention_doubles_at, *bounds)
        pool = (num_blocks, block_size, limits.kv_cache_reuse, clock)
        self._clock = clock
        self.cache = KVCache(*pool, window, mover, lambda: prefill_budget.token_ns)
        self._telemetry = telemetry or Telemetry()
        self._device_drafts = device_drafts
        max_rows = limits.max_num_rows or limits.max_num_seqs
        self._verification = Verification(speculation, self.cache, self._telemetry, max_rows)
        self.guides: Guides | None = None  # where the model can guide
        num_stages = limits.num_stages
        self._shares = StepShares(num_stages) if num_stages > 1 else None
        self._max_tokens = limits.max_num_batched_tokens
        self._cuts_prompts = limits.two_way is None
        # No more sequences run than the budget has tokens: every decode fits into every step.
        max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.waiting = WaitingQueue(limits.max_waiting, limits.max_waiting_tokens, clock)
        self.room = room = room or AdapterRoom()
        room.wake = lambda number: self.waiting.wake(waits_for(number))
        room.fail = self._adapter_failed
        shared = (self.cache, self.waiting, self._telemetry, self.finish, room)
        self._running = RunningSet(max_running, *shared)
        self._groups = self._running.groups
        self._admission = Admission(self._running)
        self._last_decodes: list[Sequence] | None = None  # of the last step, if it had no chunks
        self._launched: deque[list[Sequence]] = deque()  # rows' sequences of steps in flight
        self._changed: dict[int, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Number of sequences that hold blocks."""
        return len(self._running.sequences)

    @property
    def running(self) -> Mapping[int, Sequence]:
        """The sequences that hold blocks, by id."""
        return self._running.sequences

    @property
    def max_running(self) -> int:
        """Most sequences that run at a time."""
        return self._running.max_running

    @property
    def num_preemptions(self) -> int:
        """Number of times that sequences were preempted so far."""
        return self._running.num_preemptions

    @property
    def draft_counts(self) -> DraftCounts:
        """What became of all drafts."""
        return self._verification.counts

    @property
    def num_waiting(self) -> int:
        """Number of sequences without blocks: new, preempted or deferred."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is any sequence."""
        return bool(self._running.sequences or self.waiting)

    @property
    def needs_results(self) -> bool:
        """Whether sequences run that have no step before the last one's results: beams, drafts."""
        return bool(self._groups) or self._verification.is_active

    def earliest_end_ns(self) -> float:
        """Return when the steps in flight can have ended, by the clock; 0: not known."""
        # The first stage of a pipeline has work to do: the next launch cannot wait.
        return 0.0 if self._shares else self._prefill_budget.earliest_end_ns()

    def add(self, request: Request) -> None:
        """Queue all sequences of a new request."""
        if request.sampling.drafts is not None:
            self._verification.add(request.sequences)
        queued_ns = self._clock()
        for sequence in request.sequences:
            sequence.queued_ns = queued_ns
        first, *siblings = request.sequences
        self.waiting.add(first)
        for sibling in siblings:
            self.waiting.defer(sibling, first.id)

    def finish(self, sequence: Sequence, ending: Ending) -> None:
        """End a sequence, whatever its state, and free its blocks."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if isinstance(sequence, Beam):
            lead = sequence.group.lead
            self._groups.finish(sequence.group, ending)
            self._changed[lead.id] = lead
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._running.release(sequence, ending.reason is not FinishReason.ERROR)
        else:
            self.waiting.discard(sequence)
        self.waiting.wake(sequence.id)
        sequence.finish(ending)
        self._verification.release(sequence)
        self._changed[sequence.id] = sequence

    def _adapter_failed(self, number: int, error: Exception) -> None:
        """End the sequences that waited for an adapter which could not be loaded."""
        reason = f"the adapter could not be loaded: {type(error).__name__}"
        for sequence in self.waiting.deferred_by(waits_for(number)):
            self.finish(sequence, Ending(FinishReason.ERROR, error=reason))

    def take_changed(self) -> list[Sequence]:
        """Return the sequences that got a token or ended since the last call."""
        changed, self._changed = list(self._changed.values()), {}
        return changed

    # --- one step ------------------------------------------------------------------------------

    def schedule(self, only: tuple[frozenset[int], int] | None = None) -> Batch | None:
        """Return the next step's batch; None: nothing can run before a commit or an arrival.

        Args:
            only: ids of the sequences that may run, and the most tokens, at least one for each.
        """
        self.cache.tier.poll()
        self.room.poll()
        batch = self._schedule(only)
        self.cache.tier.start_copies()
        return batch

    def _schedule(self, only: tuple[frozenset[int], int] | None) -> Batch | None:
        num_preemptions = self._running.num_preemptions
        if self._groups:
            self._groups.fork_all()
        running: Iterable[Sequence] = self._running.sequences.values()
        if self._verification.is_active:
            self._verification.update(len(self._running.sequences))
        for sequence in [s for s in running if s.num_scheduled >= s.cache.capacity]:
            self._running.grow(sequence)
        if self.cache.tier.is_moving:
            running = [s for s in running if s.id not in self.cache.tier.not_arrived]
        if self.guides is not None and self.guides.num_active:
            running = self.guides.runnable(running)
        max_tokens = self._max_tokens
        if only is not None:
            running = [s for s in running if s.id in only[0]]
            max_tokens = only[1] if self._cuts_prompts else max_tokens
        elif self._shares is not None:
            running = self._shares.runnable(running)
        decodes, prefills = split(running)
        if self._verification.is_active:
            decodes = together(decodes, running)
        num_long = sum(self._prefill_budget.is_long(s.num_tokens) for s in prefills)
        parts = (max_tokens - len(decodes), decodes, num_long, self._prefill_budget)
        draft = StepDraft(*parts, cuts_prompts=self._cuts_prompts, window=self.cache.window)
        for sequence in prefills:
            draft.offer(sequence)
        if only is None and num_preemptions == self._running.num_preemptions:
            self._admission.admit_waiting(draft)
        draft.fill()
        if not decodes and not draft.chunks:
            return None
        has_drafts = False
        if self._verification.is_active and only is None and decodes:
            num_running, num_chunks = len(self._running.sequences), len(draft.chunks)
            has_drafts = self._verification.add_drafts(
                decodes, draft.budget, num_chunks, num_running
            )
        copies = self.cache.launch()
        self._prefill_budget.start_step(
            len(decodes), sum(num_tokens for _, num_tokens in draft.chunks)
        )
        return self._build_batch(decodes, draft.chunks, copies, has_drafts)

    def launch_took(self, took_ns: int) -> None:
        """Note the host's time for the last step, from its decision to its launch."""
        self._prefill_budget.launch_took(took_ns)

    def commit(self, batch: Batch, sampled: Sampled) -> list[Sequence]:
        """Apply the results of the oldest step: new tokens, endings, free blocks.

        Returns the sequences of its rows.
        """
        self.cache.complete()
        span = self._prefill_budget.finish_step(sampled.ended_ago_ns)
        took_ns = span.took_ns
        # A step without drafts is known by what it takes where none are made behind it, either.
        self._verification.step_took(
            batch, took_ns if batch.num_drafts else took_ns - sampled.draft_ns
        )
        now = monotonic_ns()
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        owners = self._launched.popleft()
        self._telemetry.first_tokens.step_ended(span, batch, owners)
        samplers: list[Sequence | None] = []  # None: the row was void
        for number, values in sampled.prompts.items():
            owners[number].take_prompt(values)
        for row, owner in zip(batch.rows, owners, strict=True):
            owner.num_in_flight -= 1
            if owner.num_void:
                owner.num_void -= 1
                if row.samples:
                    samplers.append(None)
                continue
            if owner.status is running:
                owner.num_computed = row.start + len(row.token_ids)
            if row.samples:
                samplers.append(owner)
        if batch.may_have_tops:
            _hand_over(samplers, sampled)
        if self._device_drafts is not None:
            self._device_drafts.take(batch, samplers, sampled)
        drafted = take_runs(batch, samplers) if batch.num_drafts else ()
        self._telemetry.tokens_sampled(
            [s for s in samplers if s is not None and s.status is not finished], now
        )
        outcomes: Iterable[int] = sampled.outcomes
        if self.guides is not None and self.guides.num_active:
            sampling = (row for row in batch.rows if row.samples)
            outcomes = map(outcome_of, samplers, sampling, outcomes)
        results = zip(samplers, sampled.token_ids, sampled.log_probs, outcomes, strict=True)
        self._append_all(results, now)
        if drafted:
            self._verification.commit(drafted, batch, sampled, now, self._append_all)
        if self._groups:
            for lead, ending in self._groups.take(samplers, sampled):
                self._changed[lead.id] = lead
                if ending is not None:
                    self.finish(lead, ending)
                elif lead.guide is not None and self.guides is not None:
                    self.guides.follow(lead.group)
        if self.guides is not None and self.guides.num_active:
            self.guides.flush()
        for owner in owners if self.cache.window.size else ():
            if owner.status is running:
                self.cache.free_outside_window(owner)
        return owners

    def _append_all(self, results: Iterable[Result], now: int) -> None:
        """Give sequences their samples: token, log prob and outcome; void rows have no sequence."""
        changed, finished = self._changed, SequenceStatus.FINISHED
        has_deferred = self.waiting.num_deferred > 0
        append: Append | None = None
        if self.guides is not None and self.guides.num_active:
            append, results = self.guides.append, self.guides.judged(results)
        for sequence, token_id, log_prob, outcome in results:
            if sequence is None:
                continue
            sequence.num_pending -= 1
            if sequence.status is finished:
                continue  # while the step ran
            if outcome != _SAMPLED:
                self._telemetry.uncount_token(sequence)
                if outcome == Outcome.NOT_FINITE:
                    # Its blocks are never shared; a new owner writes before it reads.
                    self.finish(sequence, error_of(sequence))
                else:
                    sequence.rewind()
                continue
            changed[sequence.id] = sequence
            if sequence.num_computed >= sequence.cache.register_at:
                self.cache.computed(sequence)
            if has_deferred:
                self.waiting.wake(sequence.id)
            try:
                if append is None:
                    ending = sequence.append(token_id, log_prob, now)  # a beam has its own
                else:
                    ending = append(sequence, token_id, log_prob, now)
            except Exception as error:  # of its stop words, or of values beside the token
                sequence.fail(error)
                ending = error_of(sequence)
            if ending is not None:
                if ending.reason is FinishReason.END:
                    self._telemetry.uncount_token(sequence)
                self.finish(sequence, ending)

    def roll_back(self) -> list[Sequence]:
        """Void the steps in flight; return the sequences of the oldest one's rows that still run.

        All sequences are as after the last commit, and none of these steps may be committed.
        """
        rows = list(self._launched)
        self._launched.clear()
        self._prefill_budget.discard_steps()
        self._last_decodes = None
        self.cache.roll_back()
        for owners in rows:
            for sequence in owners:
                sequence.roll_back()
        running = SequenceStatus.RUNNING
        return [sequence for sequence in dict.fromkeys(rows[0]) if sequence.status is running]

    # --- rows ----------------------------------------------------------------------------------

    def _build_batch(
        self,
        decodes: list[Sequence],
        chunks: list[tuple[Sequence, int]],
        copies: Copies,
        has_drafts: bool,
    ) -> Batch:
        """Return the batch of these rows; from here on their tokens count as scheduled."""
        is_same = not (chunks or has_drafts) and decodes == self._last_decodes
        continues = is_same and all(sequence.num_pending for sequence in decodes)
        self._last_decodes = None if chunks or has_drafts else decodes
        owners = decodes
        if has_drafts:
            rows, owners = rows_with_drafts(decodes)
        else:
            rows = [decode_row(sequence, number) for number, sequence in enumerate(decodes)]
        num_decodes = num_samples = len(rows)
        for sequence, num_tokens in chunks:
            row = chunk_row(sequence, num_tokens, num_samples)
            num_samples += row.samples
            rows.append(row)
        if self._device_drafts is not None:
            rows = self._device_drafts.ask(rows, decodes, bool(chunks))
        self._launched.append([*owners, *(sequence for sequence, _ in chunks)])
        has_tops, has_masks = self._running.num_with_tops > 0, self._has_masks(rows)
        num_drafts = num_decodes - len(decodes)
        rows_of_all = tuple(rows)
        return Batch(rows_of_all, num_decodes, continues, copies, has_tops, num_drafts, has_masks)

    def _has_masks(self, rows: list[Row]) -> bool:
        """Return whether a row has a mask, or waits for one."""
        return self._running.num_with_masks > 0 and any(row.mask is not None for row in rows)

    def check_integrity(self) -> None:
        """Assert that every block and slot is accounted for and every sequence is in one place."""
        self._running.check_integrity()
        self.waiting.check_integrity()
        self.room.check_integrity()
        idle = list(self.waiting)
        assert all(s.status is SequenceStatus.WAITING for s in idle)
        assert all(not s.cache.tables and s.num_scheduled == 0 for s in idle), "waiting with blocks"
        for sequence in [*idle, *self._running.sequences.values()]:
            assert sequence.num_preemptions <= MAX_PREEMPTIONS
            assert sequence.num_tokens == sequence.num_known + sequence.num_pending
            in_flight = sum(owners.count(sequence) for owners in self._launched)
            is_held = isinstance(sequence, Beam) and sequence.top is not None
            num_pending = sequence.num_pending - is_held
            assert num_pending <= sequence.num_in_flight == in_flight
            assert num_pending + sequence.num_void <= in_flight


def _hand_over(samplers: list[Sequence | None], sampled: Sampled) -> None:
    """Give sequences what a step made beside their samples."""
    made: dict[Sequence, list[tuple[Top | None, bytes | None]]] = {}
    for number, sequence in enumerate(samplers):
        if sequence is None:
            continue
        top = sampled.tops.get(number)
        if sequence.wanted is not None:
            made.setdefault(sequence, []).append((top, sampled.logits.get(number)))
        if sequence.moving is not None and top is not None:
            sequence.moving.sampled(top.log_prob)
    for sequence, arrived in made.items():
        assert sequence.wanted is not None
        sequence.wanted.arrive(arrived)
