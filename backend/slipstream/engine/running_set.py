"""Keep the sequences that run: their slots and blocks, and which is preempted when these run out.

Only running sequences hold blocks. A decode takes one more at each block border, so only decodes
can find the pool empty. Then the youngest sequence is preempted: it releases its blocks, waits
first in line and is computed again later. After `MAX_PREEMPTIONS` a sequence is admitted only with
all blocks that it can ever need, and is never preempted again.
"""

from collections import Counter
from collections.abc import Callable
from time import monotonic_ns

from slipstream.core.sequence import Sequence, SequenceStatus
from slipstream.core.stop import Ending
from slipstream.engine.adapter_room import AdapterRoom
from slipstream.engine.beam_group import Beam
from slipstream.engine.beam_groups import BeamGroups
from slipstream.engine.telemetry import Telemetry
from slipstream.engine.waiting import WaitingQueue
from slipstream.kvcache.cache import KVCache
from slipstream.wire import FinishReason

MAX_PREEMPTIONS = 3


class RunningSet:
    """The sequences that run, at most `max_running`.

    Args:
        max_running: number of slots.
        cache: what gives them blocks.
        waiting: where preempted sequences go.
        telemetry: is informed of each sequence that starts.
        finish: ends a sequence for which the pool is too small.
        room: of the adapters that they have.
    """

    def __init__(
        self,
        max_running: int,
        cache: KVCache,
        waiting: WaitingQueue,
        telemetry: Telemetry,
        finish: Callable[[Sequence, Ending], None],
        room: AdapterRoom,
    ) -> None:
        self.max_running = max_running
        self.cache = cache
        self.room = room
        self.waiting = waiting
        self.sequences: dict[int, Sequence] = {}  # by id
        self.num_with_tops = 0  # sequences that want values beside samples
        self.num_with_masks = 0  # sequences whose rows may have masks
        self.num_preemptions = 0
        self.groups = BeamGroups(self)
        self._telemetry = telemetry
        self._finish = finish
        self._free_slots = list(range(max_running - 1, -1, -1))

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free that no beam has reserved."""
        return len(self.sequences) + self.groups.num_reserved < self.max_running

    def start(self, sequence: Sequence) -> None:
        """Give a sequence that has its blocks a slot: it runs from now on."""
        sequence.admit()
        sequence.slot = self._free_slots.pop()
        self.sequences[sequence.id] = sequence
        self.num_with_tops += sequence.wants_values
        self.num_with_masks += sequence.has_masks
        if (adapter := sequence.request.adapter) is not None:
            self.room.acquire(adapter.number)
        if not sequence.first_scheduled_ns:
            self._telemetry.sequence_admitted(sequence)
            sequence.start(monotonic_ns())

    def release(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Take slot and blocks from a sequence; not `is_sound`: they are not found again."""
        del self.sequences[sequence.id]
        self.num_with_tops -= sequence.wants_values
        self.num_with_masks -= sequence.has_masks
        self._free_slots.append(sequence.slot)
        if (adapter := sequence.request.adapter) is not None:
            self.room.release(adapter.number)
        self.cache.release(sequence, is_sound)

    def grow(self, sequence: Sequence) -> None:
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
            if self.groups.is_alone(sequence):
                if sequence.num_in_flight:
                    return False  # the token in flight is its last and must be sent first
                self._finish(sequence, Ending(FinishReason.LENGTH))
                return False
            victims = (s for s in self.sequences.values() if s.num_preemptions < MAX_PREEMPTIONS)
            self.preempt(max(victims, key=lambda s: s.id))
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks from a sequence or its group, and let it wait first in line."""
        self.num_preemptions += 1
        if isinstance(sequence, Beam):
            self.groups.preempt(sequence.group, MAX_PREEMPTIONS)
            return
        self.release(sequence)
        self.waiting.wake(sequence.id)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        sequence.is_spared = sequence.num_preemptions >= MAX_PREEMPTIONS
        self.waiting.put_first(sequence)

    def check_integrity(self) -> None:
        """Assert that every block and slot is accounted for."""
        running = list(self.sequences.values())
        self.cache.check_integrity(running)
        self.groups.check_integrity()
        assert all(s.status is SequenceStatus.RUNNING for s in running)
        assert len(running) <= self.max_running
        slots = [*self._free_slots, *(s.slot for s in running)]
        assert sorted(slots) == list(range(self.max_running)), "a slot is lost or taken twice"
        assert self.num_with_tops == sum(s.wants_values for s in running)
        assert self.num_with_masks == sum(s.has_masks for s in running)
        adapters = (s.request.adapter for s in running)
        self.room.check_users(Counter(each.number for each in adapters if each is not None))
        for sequence in running:
            assert sequence.num_computed <= sequence.num_scheduled < sequence.num_tokens
