"""Who waits, in which order they are admitted, and how many may wait.

Some are held until another sequence, their leader, has computed what they have in common: siblings
until the first of them has the prompt, others where a prompt is being computed that begins alike.
They still count, and stand where they stood, by arrival, once the leader wakes them.

In front stand those who have run, or whose sibling has: the last to come is the first to go. Behind
them stand new requests, by priority and then by arrival; but every `OLDEST_EVERY`th of them to be
admitted is the one that has waited longest. So a new request with k older ones before it is
admitted as number `OLDEST_EVERY * (k + 1)` of them at the latest, whatever priorities come later.

Only one that is held may be later. The turn that it cannot take goes to the oldest that can, so
that nobody else is late, and it is due: once woken it goes before all other new requests but older
due ones and those whose turn it is, which makes it number `2 * (k + 1)` from then at the latest.
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
    """Waiting sequences. The first sequence of a request that never ran stands for the request."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], int]) -> None:
        """Bounds on the new requests and on their prompts' tokens; `clock` is in ns."""
        self.num_tokens = 0  # of the prompts of new requests
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._front: OrderedDict[int, Sequence] = OrderedDict()
        # Those that are due, then each priority; all by arrival.
        self._levels: list[OrderedDict[int, Sequence]] = [
            OrderedDict() for _ in range(LOWEST_PRIORITY + 2)
        ]
        self._held: dict[int, dict[int, Sequence]] = {}  # leader's id -> those that wait for it
        self._leader_ids: dict[int, int] = {}  # of those
        self._num_held_requests = 0
        self._num_admitted = 0  # new requests
        # The last ones since requests wait, all after `_since_ns`: (time, prompt tokens).
        self._recent: deque[tuple[int, int]] = deque(maxlen=_NUM_RECENT)
        self._num_recent_tokens = 0  # of those
        self._since_ns = clock()

    def __len__(self) -> int:
        return len(self._front) + len(self._leader_ids) + sum(map(len, self._levels))

    def __iter__(self) -> Iterator[Sequence]:
        for group in (self._front, *self._levels, *self._held.values()):
            yield from group.values()

    @property
    def num_requests(self) -> int:
        """Requests never scheduled yet."""
        return sum(map(len, self._levels)) + self._num_held_requests

    @property
    def num_held(self) -> int:
        """Sequences that wait for another one."""
        return len(self._leader_ids)

    @property
    def num_preempted(self) -> int:
        """Sequences that ran, and wait to go on."""
        ran = (self._front, *self._held.values())
        return sum(sequence.num_preemptions > 0 for group in ran for sequence in group.values())

    def load(self, num_running: int) -> Load:
        """How much waits, beside so many sequences that run."""
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
        """A new request."""
        if not self.num_requests:
            self._recent.clear()
            self._num_recent_tokens = 0
            self._since_ns = self._clock()
        self._levels[_rank(sequence)][sequence.id] = sequence
        self.num_tokens += sequence.num_prompt

    def put_first(self, sequence: Sequence) -> None:
        """One that ran, or whose sibling did: it goes before all others."""
        self._front[sequence.id] = sequence
        self._front.move_to_end(sequence.id, last=False)

    def hold(self, sequence: Sequence, leader_id: int) -> None:
        """It is not admitted before its leader has woken it, or is gone."""
        tokens = self.num_tokens
        self.discard(sequence)
        self.num_tokens = tokens
        self._held.setdefault(leader_id, {})[sequence.id] = sequence
        self._leader_ids[sequence.id] = leader_id
        self._num_held_requests += _is_new(sequence)

    def wake(self, leader_id: int) -> None:
        """Those that wait for this one stand where they stood."""
        group = self._held.pop(leader_id, None)
        if group is None:
            return
        back: list[dict[int, Sequence]] = [{} for _ in self._levels]
        for sequence in reversed(group.values()):
            del self._leader_ids[sequence.id]
            if _is_new(sequence):
                self._num_held_requests -= 1
                back[_rank(sequence)][sequence.id] = sequence
            else:
                self.put_first(sequence)
        for level, some in zip(self._levels, back, strict=True):
            if some:
                _put_back(level, some)

    def head(self) -> Sequence | None:
        """The next to be admitted."""
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
        """The head leaves, to run."""
        is_new = sequence.id not in self._front
        self.discard(sequence)
        if is_new:
            if self._is_turn_of_oldest and self._num_held_requests:
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
        """The one that is held whose turn this one took, if any.

        A due one has had a turn: the one that it takes is the next one's.
        """
        held = [s for group in self._held.values() for s in group.values()]
        passed = [s for s in held if _is_new(s) and not s.is_due]
        oldest = min(passed, key=lambda s: s.id, default=None)
        if oldest is not None and (admitted.is_due or oldest.id < admitted.id):
            oldest.is_due = True

    def discard(self, sequence: Sequence) -> bool:
        """It leaves; False if it was not here."""
        if self._front.pop(sequence.id, None) is not None:
            return True
        leader_id = self._leader_ids.pop(sequence.id, None)
        if leader_id is not None:
            group = self._held[leader_id]
            del group[sequence.id]
            if not group:
                del self._held[leader_id]
            if _is_new(sequence):
                self._num_held_requests -= 1
                self.num_tokens -= sequence.num_prompt
            return True
        if self._levels[_rank(sequence)].pop(sequence.id, None) is None:
            return False
        self.num_tokens -= sequence.num_prompt
        return True

    def check_integrity(self) -> None:
        """What is counted is what is there."""
        held = {s.id: leader for leader, group in self._held.items() for s in group.values()}
        assert held == self._leader_ids
        assert all(self._held.values())
        new = [sequence for sequence in self if _is_new(sequence)]
        assert self.num_requests == len(new)
        assert self.num_tokens == sum(sequence.num_prompt for sequence in new)
        for rank, level in enumerate(self._levels):
            assert all(_is_new(s) and _rank(s) == rank for s in level.values())
            assert list(level) == sorted(level)
        assert not any(map(_is_new, self._front.values()))
        assert self._num_recent_tokens == sum(num_tokens for _, num_tokens in self._recent)


def _is_new(sequence: Sequence) -> bool:
    """Does it stand for a request that never ran?"""
    return sequence.index == 0 and not sequence.first_scheduled_ns


def _rank(sequence: Sequence) -> int:
    """The level in which a new one stands."""
    return 0 if sequence.is_due else 1 + sequence.request.priority


def _put_back(level: OrderedDict[int, Sequence], back: dict[int, Sequence]) -> None:
    """Where they stood. Few came before one that was held and still wait: it was the first."""
    earlier = list(takewhile(max(back).__gt__, level))
    level.update(back)
    for sequence_id in sorted([*earlier, *back], reverse=True):
        level.move_to_end(sequence_id, last=False)
