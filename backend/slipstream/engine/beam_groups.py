"""Schedule groups of beams: admit, fork, preempt and end all of a group at once.

The beams of a group are rows of one step, so a group is admitted only with a slot for each of them,
even if the others have nothing to compute yet. Forks need blocks, so they are made where steps are
scheduled: other sequences, or the group itself, are preempted for them if need be. A group that
must not be preempted any more runs alone: the whole cache has room for it.
"""

from collections.abc import Sequence as Many
from time import monotonic_ns
from typing import Protocol

from slipstream.core.batch import Sampled
from slipstream.core.sequence import Sequence, SequenceStatus
from slipstream.core.stop import Ending
from slipstream.engine.beam_group import Beam, BeamGroup
from slipstream.engine.waiting import WaitingQueue
from slipstream.kvcache.cache import KVCache
from slipstream.kvcache.reuse import PrefixMatch
from slipstream.wire import FinishReason

_RUNNING = SequenceStatus.RUNNING


class Running(Protocol):
    """What runs, as far as groups need it."""

    cache: KVCache
    waiting: WaitingQueue
    max_running: int  # sequences
    sequences: dict[int, Sequence]  # by id

    def start(self, sequence: Sequence) -> None:
        """Give a sequence that has its blocks a slot."""

    def release(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Take slot and blocks from a sequence."""

    def make_room(self, num_blocks: int, sequence: Sequence) -> bool:
        """Free blocks for a running sequence; False: not now, or it does not run any more."""


class BeamGroups:
    """All groups that run."""

    def __init__(self, everything: Running) -> None:
        self._everything = everything
        self._running: dict[int, BeamGroup] = {}  # by the lead's id
        self._ready: dict[int, BeamGroup] = {}  # those with moves to make

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def num_reserved(self) -> int:
        """Number of slots of beams that do not run yet."""
        return sum(group.width - len(group.live) for group in self._running.values())

    def is_alone(self, sequence: Sequence) -> bool:
        """Return whether no sequence runs but this one, or the beams of its group."""
        own = len(sequence.group.live) if isinstance(sequence, Beam) else 1
        return len(self._everything.sequences) == own

    # --- admission -----------------------------------------------------------------------------

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether the next to be admitted has to wait for what runs, whatever is free."""
        num_running = len(self._everything.sequences)
        if any(group.lead.is_spared for group in self._running.values()):
            return True
        if not isinstance(sequence, Beam):
            return sequence.num_in_flight > 0
        if sequence.group.is_in_flight or (sequence.is_spared and num_running):
            return True
        taken = num_running + self.num_reserved
        return taken + sequence.group.width > self._everything.max_running

    def admit(self, lead: Beam, match: PrefixMatch) -> bool:
        """Give all beams that are live their blocks; False: there are not enough for all.

        A beam may get blocks that `match` has found: it is for the first that is admitted alone.
        Where nothing else runs they are enough, if no other block is kept to be copied from.
        """
        everything, group = self._everything, lead.group
        admitted = self._give_blocks(group, match, copies=True)
        if not admitted and not everything.sequences:
            admitted = self._give_blocks(group, everything.cache.match(lead), copies=False)
        if not admitted:
            return False
        everything.waiting.admit(lead)
        for beam in admitted:
            everything.start(beam)
        group.is_running = True
        self._running[lead.id] = group
        return True

    def _give_blocks(self, group: BeamGroup, match: PrefixMatch, copies: bool) -> list[Beam]:
        """Give all live beams their blocks; return them, or none if there are too few blocks."""
        everything, lead = self._everything, group.lead
        cache, admitted = everything.cache, list[Beam]()
        num_others = len(everything.sequences) + self.num_reserved + group.width - 1
        if not everything.sequences:
            num_others = 0  # the whole cache is theirs, and has all that the search can need
        for beam in group.live:
            found = cache.match(beam) if admitted or beam is not lead else match
            if not copies:
                found.num_copied = 0
            num_tokens = beam.num_final - 1 if lead.is_spared else beam.num_tokens
            if not cache.admit(beam, found, num_tokens, num_others):
                for other in admitted:
                    cache.release(other)
                return []
            admitted.append(beam)
        return admitted

    # --- steps ---------------------------------------------------------------------------------

    def fork_all(self) -> None:
        """Make the moves that are chosen, as far as there are blocks for them."""
        for group in list(self._ready.values()):
            if group.lead.id in self._ready:  # else it was preempted for one before it
                self._fork(group)

    def _fork(self, group: BeamGroup) -> None:
        cache, everything = self._everything.cache, self._everything
        forks = [move for move in group.moves if move.is_fork]
        needed = sum([cache.num_for_fork(move.parent, move.beam) for move in forks])
        if needed and not everything.make_room(needed, group.live[0]):
            return
        del self._ready[group.lead.id]
        for move in forks:
            cache.fork(move.parent, move.beam)
            if move.beam.status is not _RUNNING:
                if not move.beam.first_scheduled_ns:
                    move.beam.start(monotonic_ns())
                everything.start(move.beam)
        for beam in group.make_moves():
            everything.release(beam)
            beam.status = SequenceStatus.WAITING

    def take(
        self, samplers: Many[Sequence | None], sampled: Sampled
    ) -> list[tuple[Beam, Ending | None]]:
        """Take a step's results; return the leads of groups that advanced, and how each ends."""
        changed, now_ns = [], monotonic_ns()
        for number, sequence in enumerate(samplers):
            if not isinstance(sequence, Beam) or sequence.status is not _RUNNING:
                continue
            if not sequence.num_pending or sequence.top is not None:
                continue  # it was late
            group = sequence.group
            if group.deliver(sequence, sampled.tops[number]):
                try:
                    ending = group.advance(now_ns)
                except Exception as error:  # of its stop words, or of the choice of beams
                    sequence.fail(error)
                    ending = Ending(FinishReason.ERROR, error=sequence.fault)
                if ending is None:
                    self._ready[group.lead.id] = group
                changed.append((group.lead, ending))
        return changed

    # --- ends ----------------------------------------------------------------------------------

    def preempt(self, group: BeamGroup, most: int) -> None:
        """Take all slots and blocks of a group; it waits first in line, with its tokens."""
        self._stop(group, is_sound=True)
        if group.moves:
            for move in group.moves:
                if move.is_fork:
                    self._everything.cache.follow_tokens(move.parent, move.beam)
            group.make_moves()
        else:
            group.discard_results()
        for beam in group.all:
            beam.status = SequenceStatus.WAITING
            beam.num_preemptions += 1
            beam.is_spared = beam.num_preemptions >= most
        self._everything.waiting.put_first(group.lead)

    def finish(self, group: BeamGroup, ending: Ending) -> None:
        """End a group, whatever its state."""
        if group.is_running:
            self._stop(group, ending.reason is not FinishReason.ERROR)
        else:
            self._everything.waiting.discard(group.lead)
            self._everything.waiting.wake(group.lead.id)
        group.finish(ending)

    def _stop(self, group: BeamGroup, is_sound: bool) -> None:
        for beam in group.live:
            self._everything.release(beam, is_sound)
            self._everything.waiting.wake(beam.id)
        group.is_running = False
        del self._running[group.lead.id]
        self._ready.pop(group.lead.id, None)

    def check_integrity(self) -> None:
        """Assert that groups are whole."""
        num_running, most = len(self._everything.sequences), self._everything.max_running
        assert num_running + self.num_reserved <= most, "slots are promised twice"
        assert self._ready.keys() <= self._running.keys()
        for group in self._running.values():
            group.check_integrity()
            assert bool(group.moves) == (group.lead.id in self._ready)
