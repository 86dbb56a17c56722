"""Queue waiting sequences, decide which is admitted next, and limit how many may wait.

A sequence is deferred while another one, its leader, computes what they have in common: siblings
wait for the first of them to compute the prompt, others for a prompt in prefill that starts alike.
Deferred sequences still count as waiting, and return to their place when the leader wakes them.

In front are sequences that have run, or whose sibling has: the last to come goes first. Behind them
are new requests, by priority and then by arrival; but every `OLDEST_EVERY`th that is admitted is
the one that has waited longest. A new request with k older ones before it is therefore admitted as
number `OLDEST_EVERY * (k + 1)` at the latest, whatever priorities come later.

Only a deferred request can be later. When it cannot take its turn as the oldest, the turn goes to
the oldest that can, so that no other is late, and the deferred one is due: once woken, it goes
before all new requests except older due ones and the oldest in its turn. It is then admitted as
number `2 * (k + 1)` at the latest.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import takewhile

from slipstream_contract.urgency import LOWEST_PRIORITY
from slipstream_runtime.admission import UNKNOWN, Load

from slipstream.core.sequence import Sequence

OLDEST_EVERY = 8
_NUM_RECENT = 256  # admissions from which the rate is estimated


class WaitingQueue:
    """Waiting sequences. A request that never ran is represented by its first sequence."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], int]) -> None:
        """Start empty, with limits on new requests and their prompt tokens; `clock` is in ns."""
        self.num_tokens = 0  # of new requests' prompts
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._front: OrderedDict[int, Sequence] = OrderedDict()
        # Due requests, then one level for each priority; each by arrival.
        self._levels: list[OrderedDict[int, Sequence]] = [
            OrderedDict() for _ in range(LOWEST_PRIORITY + 2)
        ]
        self._deferred: dict[int, dict[int, Sequence]] = {}  # leader's id -> id -> sequence
        self._leader_ids: dict[int, int] = {}  # deferred sequence's id -> leader's id
        self._num_deferred_requests = 0
        self._num_admitted = 0  # new requests
        # Last admissions while requests waited, after `_since_ns`: (time, prompt tokens).
        self._recent: deque[tuple[int, int]] = deque(maxlen=_NUM_RECENT)
        self._num_recent_tokens = 0  # in `_recent`
        self._since_ns = clock()

    def __len__(self) -> int:
        return len(self._front) + len(self._leader_ids) + sum(map(len, self._levels))

    def __iter__(self) -> Iterator[Sequence]:
        for group in (self._front, *self._levels, *self._deferred.values()):
            yield from group.values()

    @property
    def num_requests(self) -> int:
        """Number of requests that were never scheduled."""
        return sum(map(len, self._levels)) + self._num_deferred_requests

    @property
    def num_deferred(self) -> int:
        """Number of sequences that wait for their leader."""
        return len(self._leader_ids)

    @property
    def num_preempted(self) -> int:
        """Number of preempted sequences."""
        ran = (self._front, *self._deferred.values())
        return sum(sequence.num_preemptions > 0 for group in ran for sequence in group.values())

    def load(self, num_running: int) -> Load:
        """Return how much waits, beside `num_running` sequences that run."""
        num_recent, elapsed_ms = len(self._recent), (self._clock() - self._since_ns) / 1e6
        return Load(
            self.num_requests,
            self.num_tokens,
            num_running,
            self._max_requests,
            self._max_tokens,
            elapsed_ms / num_recent if num_recent else UNKNOWN,
            elapsed_ms / self._num_recent_tokens if num_recent else UNKNOWN,
        )

    def add(self, sequence: Sequence) -> None:
        """Add a new request."""
        if not self.num_requests:
            self._recent.clear()
            self._num_recent_tokens = 0
            self._since_ns = self._clock()
        self._levels[_rank(sequence)][sequence.id] = sequence
        self.num_tokens += sequence.num_prompt

    def put_first(self, sequence: Sequence) -> None:
        """Put a sequence that ran, or whose sibling did, before all others."""
        self._front[sequence.id] = sequence
        self._front.move_to_end(sequence.id, last=False)

    def defer(self, sequence: Sequence, leader_id: int) -> None:
        """Defer a sequence until its leader wakes it."""
        tokens = self.num_tokens
        self.discard(sequence)
        self.num_tokens = tokens
        self._deferred.setdefault(leader_id, {})[sequence.id] = sequence
        self._leader_ids[sequence.id] = leader_id
        self._num_deferred_requests += _is_new(sequence)

    def wake(self, leader_id: int) -> bool:
        """Return the sequences that this leader deferred to their places; False: none."""
        group = self._deferred.pop(leader_id, None)
        if group is None:
            return False
        back: list[dict[int, Sequence]] = [{} for _ in self._levels]
        for sequence in reversed(group.values()):
            del self._leader_ids[sequence.id]
            if _is_new(sequence):
                self._num_deferred_requests -= 1
                back[_rank(sequence)][sequence.id] = sequence
            else:
                self.put_first(sequence)
        for level, some in zip(self._levels, back, strict=True):
            if some:
                _put_back(level, some)
        return True

    def deferred_by(self, leader_id: int) -> list[Sequence]:
        """Return the sequences that a leader has deferred."""
        return list(self._deferred.get(leader_id, {}).values())

    def head(self) -> Sequence | None:
        """Return the next sequence to admit, or None."""
        if self._front:
            return next(iter(self._front.values()))
        firsts = [next(iter(level.values())) for level in self._levels if level]
        if not firsts:
            return None
        if self._is_turn_of_oldest:
            not_due = [sequence for sequence in firsts if not sequence.is_due]
            return min(not_due or firsts, key=lambda sequence: sequence.id)
        return firsts[0]

    def admit(self, sequence: Sequence) -> None:
        """Remove the head, which runs from now on."""
        is_new = sequence.id not in self._front
        self.discard(sequence)
        if is_new:
            if self._is_turn_of_oldest and self._num_deferred_requests:
                self._make_due(sequence)
            self._num_admitted += 1
            if len(self._recent) == _NUM_RECENT:
                self._since_ns, num_tokens = self._recent[0]
                self._num_recent_tokens -= num_tokens
            self._recent.append((self._clock(), sequence.num_prompt))
            self._num_recent_tokens += sequence.num_prompt

    @property
    def _is_turn_of_oldest(self) -> bool:
        return self._num_admitted % OLDEST_EVERY == OLDEST_EVERY - 1

    def _make_due(self, admitted: Sequence) -> None:
        """Mark the deferred request whose turn as the oldest `admitted` took, if there is one.

        If `admitted` was due itself, it took the turn of the next oldest.
        """
        deferred = [s for group in self._deferred.values() for s in group.values()]
        passed = [s for s in deferred if _is_new(s) and not s.is_due]
        oldest = min(passed, key=lambda s: s.id, default=None)
        if oldest is not None and (admitted.is_due or oldest.id < admitted.id):
            oldest.is_due = True

    def discard(self, sequence: Sequence) -> bool:
        """Remove a sequence; return False if it is not here."""
        if self._front.pop(sequence.id, None) is not None:
            return True
        leader_id = self._leader_ids.pop(sequence.id, None)
        if leader_id is not None:
            group = self._deferred[leader_id]
            del group[sequence.id]
            if not group:
                del self._deferred[leader_id]
            if _is_new(sequence):
                self._num_deferred_requests -= 1
                self.num_tokens -= sequence.num_prompt
            return True
        if self._levels[_rank(sequence)].pop(sequence.id, None) is None:
            return False
        self.num_tokens -= sequence.num_prompt
        return True

    def check_integrity(self) -> None:
        """Assert that the counts equal the contents."""
        deferred = {
            s.id: leader for leader, group in self._deferred.items() for s in group.values()
        }
        assert deferred == self._leader_ids
        assert all(self._deferred.values())
        new = [sequence for sequence in self if _is_new(sequence)]
        assert self.num_requests == len(new)
        assert self.num_tokens == sum(sequence.num_prompt for sequence in new)
        for rank, level in enumerate(self._levels):
            assert all(_is_new(s) and _rank(s) == rank for s in level.values())
            assert list(level) == sorted(level)
        assert not any(map(_is_new, self._front.values()))
        assert self._num_recent_tokens == sum(num_tokens for _, num_tokens in self._recent)


def _is_new(sequence: Sequence) -> bool:
    """Return whether a sequence represents a request that never ran."""
    return sequence.index == 0 and not sequence.first_scheduled_ns


def _rank(sequence: Sequence) -> int:
    """Return the level of a new sequence: 0 if it is due, else by priority."""
    return 0 if sequence.is_due else 1 + sequence.request.message.priority


def _put_back(level: OrderedDict[int, Sequence], back: dict[int, Sequence]) -> None:
    """Put deferred sequences back into a level, by id.

    Only few earlier sequences still wait in front of a deferred one, which was the first of them.
    """
    earlier = list(takewhile(max(back).__gt__, level))
    level.update(back)
    for sequence_id in sorted([*earlier, *back], reverse=True):
        level.move_to_end(sequence_id, last=False)
