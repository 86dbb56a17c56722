"""Decide what the next step computes: decodes first, then prefill chunks within the token limit.

A running sequence with one token left to compute is a decode; with more (a new prompt, or the whole
sequence after a preemption) it is computed in chunks. Beside decodes, chunks of long prompts are
limited by the prefill budget. Scheduling a step costs O(sequences), not O(tokens).

Only running sequences hold blocks. A sequence is admitted with blocks for all its tokens; a decode
takes one more at each block border, so only decodes can find the pool empty. Then the youngest
sequence is preempted: it releases its blocks, waits first in line and is computed again later.
After `MAX_PREEMPTIONS` a sequence is admitted only with all blocks that it can ever need, and is
never preempted again.

The cache finds what is already computed. If a running sequence (the leader) is computing what the
next one to admit would compute too, that one is deferred until it is done, and others go first.
Siblings (n > 1) are deferred until the first of them has computed the prompt. A leader that stops
running wakes the sequences that it deferred: none waits for a sequence that does not run, or is
deferred more than `MAX_DEFERRALS` times.

A step may be scheduled while the one before it runs, whose tokens are then known by number only
(`Sequence.num_pending`): a row names its sample. A sequence that turns out to have ended has a row
in flight that is ignored; a sequence that is preempted meanwhile still gets its token.

Drafts go into steps of decodes alone: see `verification.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns

from slipstream.core.batch import Batch, Outcome, Sampled, Top
from slipstream.core.drafts import Speculation, take_runs
from slipstream.core.rows import chunk_row, decode_row, rows_with_drafts
from slipstream.core.sequence import Request, Sequence, SequenceStatus
from slipstream.core.stop import Ending
from slipstream.core.window import AttentionWindow
from slipstream.engine.beam_group import Beam
from slipstream.engine.beam_groups import BeamGroups
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.guides import Append, Guides, error_of
from slipstream.engine.prefill_budget import PrefillBudget
from slipstream.engine.telemetry import Telemetry
from slipstream.engine.verification import Result, Verification
from slipstream.engine.waiting import WaitingQueue
from slipstream.kvcache.cache import Copies, KVCache
from slipstream.kvcache.host import Mover
from slipstream.kvcache.reuse import PrefixMatch
from slipstream.wire import FinishReason

MAX_PREEMPTIONS = 3
MAX_DEFERRALS = 3
_MAX_DEFERRED_A_STEP = 64  # each costs a search for its prompt
_SAMPLED = int(Outcome.SAMPLED)  # an enumeration compares slowly


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler, from `EngineConfig`."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int = 4096
    max_waiting_tokens: int = 2_097_152
    long_prompt_tokens: int = 1024
    kv_cache_reuse: bool = True
    logprobs_mode: str = "raw_logprobs"  # of requests that do not say
    max_logits_bytes: int = 1 << 26  # of one request
    max_num_rows: int = 0  # of a step that samples, drafts included; 0: max_num_seqs


@dataclass(slots=True)
class _StepDraft:
    """A step while it is being scheduled."""

    budget: int  # tokens that it can still take
    long_budget: int | None  # of long prompts; None: not taken from `PrefillBudget` yet
    num_long: int  # long prompts in prefill
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)


class Scheduler:
    """Queues, blocks, and the decision of each step: `schedule`, run the batch, `commit`.

    Steps are committed (or fail) in the order in which they were scheduled, and at most one is in
    flight when the next one is scheduled.
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
        speculation: Speculation | None = None,
        device_drafts: DeviceDrafts | None = None,
    ) -> None:
        self._prefill_budget = prefill_budget = PrefillBudget(clock, attention_doubles_at)
        pool = (num_blocks, block_size, limits.kv_cache_reuse, clock)
        self.cache = KVCache(*pool, window, mover, lambda: prefill_budget.token_ns)
        self._telemetry = telemetry or Telemetry()
        self._device_drafts = device_drafts
        self._verification: Verification | None = None
        if speculation is not None:
            max_rows = max(limits.max_num_rows, limits.max_num_seqs)
            parts = (self.cache, self._telemetry, max_rows)
            self._verification = Verification(speculation, *parts)
        self.guides: Guides | None = None  # where the model can guide
        self.num_preemptions = 0
        self._max_tokens = limits.max_num_batched_tokens
        self._long_tokens = limits.long_prompt_tokens
        # No more sequences run than the budget has tokens: every decode fits into every step.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.waiting = WaitingQueue(limits.max_waiting, limits.max_waiting_tokens, clock)
        self._running: dict[int, Sequence] = {}
        self._num_with_tops = 0  # running sequences that want values beside samples
        self._free_slots = list(range(self._max_running - 1, -1, -1))
        self._last_decodes: list[Sequence] | None = None  # of the last step, if it had no chunks
        self._groups = BeamGroups(self)
        self._launched: deque[list[Sequence]] = deque()  # rows' sequences of steps in flight
        self._changed: dict[int, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Number of sequences that hold blocks."""
        return len(self._running)

    @property
    def running(self) -> Mapping[int, Sequence]:
        """The sequences that hold blocks, by id."""
        return self._running

    @property
    def max_running(self) -> int:
        """Most sequences that run at a time."""
        return self._max_running

    @property
    def num_waiting(self) -> int:
        """Number of sequences without blocks: new, preempted or deferred."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is any sequence."""
        return bool(self._running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue all sequences of a new request."""
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
            self.release(sequence, ending.reason is not FinishReason.ERROR)
        else:
            self.waiting.discard(sequence)
        self.waiting.wake(sequence.id)
        sequence.finish(ending)
        if self._verification is not None:
            self._verification.release(sequence)
        self._changed[sequence.id] = sequence

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
        batch = self._schedule(only)
        self.cache.tier.start_copies()
        return batch

    def _schedule(self, only: tuple[frozenset[int], int] | None) -> Batch | None:
        num_preemptions = self.num_preemptions
        if self._groups:
            self._groups.fork_all()
        running: Iterable[Sequence] = self._running.values()
        for sequence in [s for s in running if s.num_scheduled >= s.cache.capacity]:
            self._grow(sequence)
        if self.cache.tier.is_moving:
            running = [s for s in running if s.id not in self.cache.tier.not_arrived]
        if self.guides is not None and self.guides.num_active:
            running = self.guides.runnable(running)
        max_tokens = self._max_tokens
        if only is not None:
            running, max_tokens = [s for s in running if s.id in only[0]], only[1]
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in running:
            num_tokens = sequence.num_tokens
            if num_tokens - sequence.num_scheduled > 1:
                prefills.append(sequence)
            elif (
                num_tokens < sequence.num_final  # else its last token is in flight
                and num_tokens <= sequence.cache.capacity  # else it waits for a fence
                and not (
                    sequence.num_pending and (sequence.needs_every_token or sequence.is_speculating)
                )
            ):
                decodes.append(sequence)
        num_long = sum(s.num_tokens > self._long_tokens for s in prefills)
        long_budget = None if decodes else max_tokens
        draft = _StepDraft(max_tokens - len(decodes), long_budget, num_long, decodes)
        for sequence in prefills:
            self._add_tokens(sequence, draft)
        if only is None and num_preemptions == self.num_preemptions:
            self._admit_waiting(draft)
        if not decodes and not draft.chunks:
            return None
        has_drafts = False
        if self._verification is not None and only is None and not draft.chunks:
            num_running = len(self._running)
            has_drafts = self._verification.add_drafts(decodes, draft.budget, num_running)
        copies = self.cache.launch()
        self._prefill_budget.start_step(
            len(decodes), sum(num_tokens for _, num_tokens in draft.chunks)
        )
        if has_drafts:
            self._last_decodes = None
            rows, owners = rows_with_drafts(decodes)
            if self._device_drafts is not None:
                rows = self._device_drafts.ask(rows)
            self._launched.append(owners)
            num_drafts, has_tops = len(rows) - len(decodes), self._num_with_tops > 0
            return Batch(tuple(rows), len(rows), False, copies, has_tops, num_drafts)
        return self._build_batch(decodes, draft.chunks, copies)

    def commit(self, batch: Batch, sampled: Sampled) -> list[Sequence]:
        """Apply the results of the oldest step: new tokens, endings, free blocks.

        Returns the sequences of its rows.
        """
        self.cache.complete()
        took_ns = self._prefill_budget.finish_step()
        if self._verification is not None:
            self._verification.step_took(batch, took_ns)
        now = monotonic_ns()
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED
        owners = self._launched.popleft()
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
            self._device_drafts.take(batch, samplers, sampled.drafts)
        drafted = take_runs(batch, samplers) if batch.num_drafts else ()
        self._telemetry.tokens_sampled(
            [s for s in samplers if s is not None and s.status is not finished], now
        )
        results = zip(samplers, sampled.token_ids, sampled.log_probs, sampled.outcomes, strict=True)
        self._append_all(results, now)
        for sequence, numbers in drafted:
            assert self._verification is not None
            rows, own = batch.rows[numbers], sampled.part(numbers)
            self._verification.commit(sequence, rows, own, now, self._append_all)
        if self._groups:
            for lead, ending in self._groups.take(samplers, sampled):
                self._changed[lead.id] = lead
                if ending is not None:
                    self.finish(lead, ending)
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
                    self.finish(sequence, Ending(FinishReason.ERROR, error=error_of(sequence)))
                else:
                    sequence.rewind()
                continue
            changed[sequence.id] = sequence
            if sequence.num_computed >= sequence.cache.register_at:
                self.cache.computed(sequence)
            if has_deferred:
                self.waiting.wake(sequence.id)
            if append is None:
                ending = sequence.append(token_id, log_prob, now)  # a beam has its own
            else:
                ending = append(sequence, token_id, log_prob, now)
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

    def _add_tokens(self, sequence: Sequence, draft: _StepDraft) -> None:
        """Add as many tokens of a sequence to the step as the budget allows."""
        num_left = sequence.num_tokens - sequence.num_scheduled
        num_tokens = min(num_left, draft.budget, sequence.cache.capacity - sequence.num_scheduled)
        if num_left > 1 and sequence.num_tokens > self._long_tokens:
            if draft.long_budget is None:
                draft.long_budget = self._prefill_budget.take(
                    max(1, draft.num_long), sequence.num_scheduled
                )
            num_tokens = min(num_tokens, draft.long_budget)
            draft.long_budget -= num_tokens
        if num_tokens == num_left == 1:
            draft.decodes.append(sequence)  # a single token that samples is a decode
        elif num_tokens:
            draft.chunks.append((sequence, num_tokens))
        draft.budget -= num_tokens

    def _build_batch(
        self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]], copies: Copies
    ) -> Batch:
        """Return the batch of these rows; from here on their tokens count as scheduled."""
        is_same = not chunks and decodes == self._last_decodes
        continues = is_same and all(sequence.num_pending for sequence in decodes)
        self._last_decodes = None if chunks else decodes
        rows = [decode_row(sequence, number) for number, sequence in enumerate(decodes)]
        num_samples = len(decodes)
        for sequence, num_tokens in chunks:
            row = chunk_row(sequence, num_tokens, num_samples)
            num_samples += row.samples
            rows.append(row)
        if self._device_drafts is not None:
            rows = self._device_drafts.ask(rows)
        self._launched.append([*decodes, *(sequence for sequence, _ in chunks)])
        return Batch(tuple(rows), len(decodes), continues, copies, self._num_with_tops > 0)

    # --- admission and preemption --------------------------------------------------------------

    def _admit_waiting(self, draft: _StepDraft) -> None:
        num_deferred = 0
        while draft.budget and len(self._running) + self._groups.num_reserved < self._max_running:
            sequence = self.waiting.head()
            if sequence is None or self._groups.must_wait(sequence):
                return
            num_running = len(self._running)
            if not self.cache.tier.has_room((num_running + 1) * self.cache.window.num_tables):
                return
            match = self.cache.match(sequence)
            if (leader := self._leader_worth_awaiting(sequence, match, draft)) is not None:
                sequence.num_deferrals += 1
                self.waiting.defer(sequence, leader.id)
                num_deferred += 1
                if num_deferred == _MAX_DEFERRED_A_STEP:
                    return
            elif self._admit(sequence, match):
                started = sequence.group.live if isinstance(sequence, Beam) else (sequence,)
                for each in started:
                    is_ready = each.guide is None or each.guide.can_run(each.num_pending)
                    if is_ready and each.id not in self.cache.tier.not_arrived:
                        self._add_tokens(each, draft)
            else:
                return

    def _leader_worth_awaiting(
        self, sequence: Sequence, match: PrefixMatch, draft: _StepDraft
    ) -> Sequence | None:
        """Return the leader if waiting for it saves work, else None.

        It does if the sequence needs most of what the leader still computes, or if the step has no
        tokens left for the sequence and the leader computes a fourth of it. A short prompt never
        waits for a long one, which is slower.
        """
        if (leader := match.leader) is None or sequence.num_deferrals == MAX_DEFERRALS:
            return None
        is_long, is_slow = (s.num_tokens > self._long_tokens for s in (sequence, leader))
        is_idle = is_long and draft.long_budget == 0
        is_most = 2 * match.num_leader_tokens >= leader.num_tokens - leader.num_computed
        is_much = is_idle and 4 * match.num_leader_tokens >= sequence.num_tokens
        return leader if is_slow <= is_long and (is_most or is_much) else None

    def _admit(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Give a waiting sequence its blocks, if that leaves some for each running sequence."""
        if isinstance(sequence, Beam):
            return self._groups.admit(sequence, match)
        num_tokens = sequence.num_final - 1 if sequence.is_spared else sequence.num_tokens
        num_others = len(self._running) + self._groups.num_reserved
        if not self.cache.admit(sequence, match, num_tokens, num_others):
            return False
        self.waiting.admit(sequence)
        self.start(sequence)
        return True

    def start(self, sequence: Sequence) -> None:
        """Give a sequence that has its blocks a slot: it runs from now on."""
        sequence.admit()
        sequence.slot = self._free_slots.pop()
        self._running[sequence.id] = sequence
        self._num_with_tops += sequence.wants_values
        if not sequence.first_scheduled_ns:
            self._telemetry.sequence_admitted(sequence)
            sequence.start(monotonic_ns())

    def _grow(self, sequence: Sequence) -> None:
        """Add room for one more block of tokens, preempting the youngest sequence if necessary."""
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted for an older one in this step
        if sequence.num_tokens == sequence.num_final:
            return  # its last token is in flight and needs no block
        tables = self.cache.shortest_tables(sequence)
        if self.make_room(len(tables), sequence):
            self.cache.grow(sequence, tables)

    def make_room(self, num_blocks: int, sequence: Sequence) -> bool:
        """Free blocks for a running sequence, preempting the youngest ones if necessary.

        Returns False if they come later, or if the sequence does not run any more.
        """
        while not self.cache.tier.has_room(num_blocks):
            if self.cache.num_becoming_free:
                return False  # a step or copy in flight frees a block
            if self.cache.window.size and sequence.num_in_flight:
                return False  # blocks that leave its window with that step can be used again
            if self._groups.is_alone(sequence):
                if sequence.num_in_flight:
                    return False  # the token in flight is its last and must be sent first
                self.finish(sequence, Ending(FinishReason.LENGTH))
                return False
            victims = (s for s in self._running.values() if s.num_preemptions < MAX_PREEMPTIONS)
            self._preempt(max(victims, key=lambda s: s.id))
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if isinstance(sequence, Beam):
            self._groups.preempt(sequence.group, MAX_PREEMPTIONS)
            self.num_preemptions += 1
            return
        self.release(sequence)
        self.waiting.wake(sequence.id)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        sequence.is_spared = sequence.num_preemptions >= MAX_PREEMPTIONS
        self.num_preemptions += 1
        self.waiting.put_first(sequence)

    def release(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Take slot and blocks from a sequence; not `is_sound`: they are not found again."""
        del self._running[sequence.id]
        self._num_with_tops -= sequence.wants_values
        self._free_slots.append(sequence.slot)
        self.cache.release(sequence, is_sound)

    def check_integrity(self) -> None:
        """Assert that every block and slot is accounted for and every sequence is in one place."""
        running = list(self._running.values())
        self.cache.check_integrity(running)
        self.waiting.check_integrity()
        self._groups.check_integrity()
        idle = list(self.waiting)
        assert all(s.status is SequenceStatus.RUNNING for s in running)
        assert all(s.status is SequenceStatus.WAITING for s in idle)
        assert all(not s.cache.tables and s.num_scheduled == 0 for s in idle), "waiting with blocks"
        assert len(running) <= self._max_running
        slots = [*self._free_slots, *(s.slot for s in running)]
        assert sorted(slots) == list(range(self._max_running)), "a slot is lost or taken twice"
        for sequence in [*idle, *running]:
            assert sequence.num_preemptions <= MAX_PREEMPTIONS
            assert sequence.num_tokens == sequence.num_known + sequence.num_pending
            in_flight = sum(owners.count(sequence) for owners in self._launched)
            is_held = isinstance(sequence, Beam) and sequence.top is not None
            num_pending = sequence.num_pending - is_held
            assert num_pending <= sequence.num_in_flight == in_flight
            assert num_pending + sequence.num_void <= in_flight
        assert self._num_with_tops == sum(s.wants_values for s in running)
        for sequence in running:
            assert sequence.num_computed <= sequence.num_scheduled < sequence.num_tokens


def _hand_over(samplers: list[Sequence | None], sampled: Sampled) -> None:
    """Give sequences what a step made beside their samples."""
    made: dict[Sequence, list[tuple[Top | None, bytes | None]]] = {}
    for number, sequence in enumerate(samplers):
        if sequence is not None and sequence.wanted is not None:
            values = sampled.tops.get(number), sampled.logits.get(number)
            made.setdefault(sequence, []).append(values)
    for sequence, arrived in made.items():
        assert sequence.wanted is not None
        sequence.wanted.arrive(arrived)
