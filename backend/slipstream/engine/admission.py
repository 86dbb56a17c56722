"""Admit waiting sequences to a step, or defer them while another one computes their prefix.

A sequence is admitted with blocks for all its tokens. The cache finds what is already computed. If
a running sequence (the leader) is computing what the next one to admit would compute too, that one
is deferred until it is done, and others go first; none is deferred more than `MAX_DEFERRALS` times.
One whose adapter is not on the device is deferred until it is (`adapter_room.py`).
"""

from slipstream.core.sequence import Sequence
from slipstream.engine.adapter_room import waits_for
from slipstream.engine.beam_group import Beam
from slipstream.engine.running_set import RunningSet
from slipstream.engine.step_draft import StepDraft
from slipstream.kvcache.reuse import PrefixMatch

MAX_DEFERRALS = 3
_MAX_DEFERRED_A_STEP = 64  # each costs a search for its prompt


class Admission:
    """The way from waiting to running."""

    def __init__(self, running: RunningSet) -> None:
        self._running = running
        self._waiting = running.waiting
        self._cache = running.cache
        self._room = running.room

    def admit_waiting(self, draft: StepDraft) -> None:
        """Admit sequences, and add their tokens, while there are room for them and a budget."""
        num_deferred, running, tier = 0, self._running, self._cache.tier
        while running.has_slot:
            sequence = self._waiting.head()
            if sequence is None or running.groups.must_wait(sequence):
                return
            if not draft.has_room_for(sequence):
                return
            num_running = len(running.sequences)
            if not tier.has_room((num_running + 1) * self._cache.window.num_tables):
                return
            adapter = sequence.request.adapter
            if adapter is not None and not self._room.is_ready(adapter.number):
                self._waiting.defer(sequence, waits_for(adapter.number))
                continue
            match = self._cache.match(sequence)
            if (leader := self._leader_worth_awaiting(sequence, match, draft)) is not None:
                sequence.num_deferrals += 1
                self._waiting.defer(sequence, leader.id)
                num_deferred += 1
                if num_deferred == _MAX_DEFERRED_A_STEP:
                    return
            elif self._admit(sequence, match):
                started = sequence.group.live if isinstance(sequence, Beam) else (sequence,)
                for each in started:
                    is_ready = each.guide is None or each.guide.can_run(each.num_pending)
                    if is_ready and each.id not in tier.not_arrived:
                        draft.offer(each)
            else:
                return

    def _leader_worth_awaiting(
        self, sequence: Sequence, match: PrefixMatch, draft: StepDraft
    ) -> Sequence | None:
        """Return the leader if waiting for it saves work, else None.

        It does if the sequence needs most of what the leader still computes, or if the step has no
        tokens left for the sequence and the leader computes a fourth of it. A short prompt never
        waits for a long one, which is slower.
        """
        if (leader := match.leader) is None or sequence.num_deferrals == MAX_DEFERRALS:
            return None
        is_long, is_slow = (draft.prefill_budget.is_long(s.num_tokens) for s in (sequence, leader))
        is_idle = is_long and not draft.has_room_for_long
        is_most = 2 * match.num_leader_tokens >= leader.num_tokens - leader.num_computed
        is_much = is_idle and 4 * match.num_leader_tokens >= sequence.num_tokens
        return leader if is_slow <= is_long and (is_most or is_much) else None

    def _admit(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Give a waiting sequence its blocks, if that leaves some for each running sequence."""
        running = self._running
        if isinstance(sequence, Beam):
            return running.groups.admit(sequence, match)
        num_tokens = sequence.num_final - 1 if sequence.is_spared else sequence.num_tokens
        num_others = len(running.sequences) + running.groups.num_reserved
        if not self._cache.admit(sequence, match, num_tokens, num_others):
            return False
        self._waiting.admit(sequence)
        running.start(sequence)
        return True
