"""Who waits, in which order they are admitted, and how many may wait.

Some are held until another sequence, their leader, has computed what they have in common: siblings
until the first of them has the prompt, others where a prompt is being computed that begins alike.
They still count, and stand where they stood once the leader wakes them.

In front stand those who have run, or whose sibling has: the last to come is the first to go. Behind
them stand new requests, by priority and then by arrival; but every `OLDEST_EVERY`th of them to be
admitted is the one that has waited longest. So a new request with k older ones before it is
admitted as number `OLDEST_EVERY * (k + 1)` of them at the latest, whatever priorities come later.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from slipstream_contract.admission import UNKNOWN, Load
from slipstream_contract.urgency import LOWEST_PRIORITY

from slipstream.engine.sequence import Sequence

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
        self._levels: list[OrderedDict[int, Sequence]] = [
            OrderedDict() for _ in range(LOWEST_PRIORITY + 1)
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
        self._levels[sequence.request.priority][sequence.id] = sequence
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
        """Those that wait for this one stand where they stood, before all that came later."""
        for sequence in reversed(self._held.pop(leader_id, {}).values()):
            del self._leader_ids[sequence.id]
            if _is_new(sequence):
                self._num_held_requests -= 1
                level = self._levels[sequence.request.priority]
                level[sequence.id] = sequence
                level.move_to_end(sequence.id, last=False)
            else:
                self.put_first(sequence)

    def head(self) -> Sequence | None:
        """The next to be admitted."""
        if self._front:
            return next(iter(self._front.values()))
        firsts = [next(iter(level.values())) for level in self._levels if level]
        if not firsts:
            return None
        if self._num_admitted % OLDEST_EVERY == OLDEST_EVERY - 1:
            return min(firsts, key=lambda sequence: sequence.id)
        return firsts[0]

    def admit(self, sequence: Sequence) -> None:
        """The head leaves, to run."""
        is_new = sequence.id not in self._front
        self.discard(sequence)
        if is_new:
            self._num_admitted += 1
            if len(self._recent) == _NUM_RECENT:
                self._since_ns, num_tokens = self._recent[0]
                self._num_recent_tokens -= num_tokens
            self._recent.append((self._clock(), sequence.num_prompt))
            self._num_recent_tokens += sequence.num_prompt

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
        if self._levels[sequence.request.priority].pop(sequence.id, None) is None:
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
        assert all(_is_new(s) for level in self._levels for s in level.values())
        assert not any(map(_is_new, self._front.values()))
        assert self._num_recent_tokens == sum(num_tokens for _, num_tokens in self._recent)


def _is_new(sequence: Sequence) -> bool:
    """Does it stand for a request that never ran?"""
    return sequence.index == 0 and not sequence.first_scheduled_ns
