"""Which adapters are on the device: a pool of pages, smaller than all that there are.

A sequence starts when its adapter is there; until then it is deferred, while others go on. What no
running sequence uses is evicted for what is wanted, the one used longest ago first. An adapter that
was loaded stays until a sequence that waited for it has started.

Room is given in the order in which it was wanted. One that fits into what is free may pass
another that needs more, and so may sequences whose adapter is there, `MAX_PASSED` times in all.
Then no other adapter is taken until the first has room: what runs ends, so none waits for ever.
Sequences without an adapter pass at any time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

MAX_PASSED = 16
_MAX_TRIED = 8  # adapters for which room is looked for at a time
_WAIT_S = 0.01  # with nothing to compute, for a load


class Pool(Protocol):
    """The device's pages, and the adapters that are in them."""

    num_pages: int

    def pages_of(self, number: int) -> int:
        """Return how many pages an adapter takes."""

    def start_load(self, number: int) -> None:
        """Start to copy an adapter to the device."""

    def take_loaded(self, seconds: float = 0.0) -> Sequence[tuple[int, Exception | None]]:
        """Take the adapters whose copies have ended, and why one failed; wait for one so long."""

    def evict(self, number: int) -> None:
        """Give up an adapter's pages; steps in flight keep it to their end."""

    def remove(self, number: int) -> None:
        """Discard an adapter, which is not being loaded."""


class AdapterRoom:
    """The adapters in the pool's pages, by number. All pages of one come and go together."""

    def __init__(self, pool: Pool | None = None) -> None:
        """Start with an empty pool; None: there are no adapters at all."""
        self._pool = pool
        self._there: dict[int, int] = {}  # pages of each, the one used longest ago first
        self._loading: set[int] = set()  # of them
        self._users: Counter[int] = Counter()  # running sequences
        self._reserved: set[int] = set()  # for sequences that waited, of which none has started
        self._wanted: dict[int, int] = {}  # without room, in order: how often each was passed
        self._removed: set[int] = set()  # while they were loaded
        self.num_loads = self.num_evictions = 0
        self.wake: Callable[[int], bool] = lambda number: False  # what waits for one; is there any?
        self.fail: Callable[[int, Exception], None] = lambda number, error: None

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return 0 if self._pool is None else self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that no adapter has."""
        return self.num_pages - sum(self._there.values())

    @property
    def num_there(self) -> int:
        """Adapters that are on the device, or on their way."""
        return len(self._there)

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being loaded."""
        return bool(self._loading)

    def is_ready(self, number: int) -> bool:
        """Return whether a sequence with an adapter may start. If not, `wake` says when it may."""
        if number in self._reserved:
            return True
        if number in self._loading:
            return False
        if number in self._there and not self._is_closed_to(number):
            return True
        self._wanted.setdefault(number, 0)
        self._give_room()
        return number in self._reserved  # never: its load has only started

    def acquire(self, number: int) -> None:
        """Keep an adapter for a sequence that starts to run."""
        assert number in self._there, "a sequence runs without its adapter"
        assert number not in self._loading, "a sequence runs before its adapter is there"
        self._reserved.discard(number)
        self._users[number] += 1
        self._pass_first(number)

    def release(self, number: int) -> None:
        """Give it up again, as the one that was used last."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
            self._there[number] = self._there.pop(number)

    def unwant(self, number: int) -> None:
        """Give up what an adapter has of room for sequences that wait: none is left."""
        self._wanted.pop(number, None)
        self._reserved.discard(number)

    def remove(self, number: int) -> None:
        """Discard an adapter that nothing uses any more; one on its way when it has arrived."""
        assert self._pool is not None, "it came from there"
        assert number not in self._users, "a running sequence has it"
        self.unwant(number)
        if number in self._loading:
            self._removed.add(number)
            return
        if self._there.pop(number, 0):
            self._pool.evict(number)
        self._pool.remove(number)

    def poll(self, seconds: float = 0.0) -> None:
        """Take what has been loaded, and give room that has become free.

        `seconds`: to wait for a load at most, if there is one.
        """
        if self._loading:
            assert self._pool is not None, "it loads"
            for number, error in self._pool.take_loaded(seconds):
                self._loaded(number, error)
        if self._wanted:
            self._give_room()

    def wait(self) -> bool:
        """Wait for a load, a moment; return False if there is none."""
        if self._loading:
            self.poll(_WAIT_S)
            return True
        return False

    def check_users(self, users: Counter[int]) -> None:
        """Assert that these are the sequences that run, counted by their adapters."""
        assert users == self._users

    def check_integrity(self) -> None:
        """Assert that the pool has what it says, and that what is wanted can come."""
        assert self.num_free >= 0, "more pages than there are"
        assert self._loading <= self._there.keys()
        assert self._users.keys() <= self._there.keys() - self._loading
        assert self._reserved <= self._there.keys() - self._loading
        assert self._removed <= self._loading
        assert not self._wanted.keys() & (self._loading | self._reserved)
        assert all(count > 0 for count in self._users.values())

    def _loaded(self, number: int, error: Exception | None) -> None:
        assert self._pool is not None, "it loaded"
        self._loading.remove(number)
        is_removed = number in self._removed
        self._removed.discard(number)
        if error is not None or is_removed:
            del self._there[number]
            self._pool.evict(number)
        if is_removed:
            self._pool.remove(number)
        elif error is not None:
            self.fail(number, error)
        elif self.wake(number):
            self._reserved.add(number)

    @property
    def _first(self) -> int:
        """The adapter that gets room next; 0: none wants any."""
        return next(iter(self._wanted), 0)

    def _is_closed_to(self, number: int) -> bool:
        """Return whether an adapter must wait for the first one, which was passed too often."""
        first = self._first
        return bool(first) and first != number and self._wanted[first] >= MAX_PASSED

    def _pass_first(self, number: int) -> None:
        first = self._first
        if first and first != number:
            self._wanted[first] += 1

    def _give_room(self) -> None:
        """Start the loads for which there are pages, and wake what has only waited its turn."""
        assert self._pool is not None, "an adapter is wanted"
        for number in list(islice(self._wanted, _MAX_TRIED)):
            if self._is_closed_to(number):
                break
            if number in self._there:
                del self._wanted[number]
                if self.wake(number):
                    self._reserved.add(number)
            elif self._make_room(pages := self._pool.pages_of(number)):
                del self._wanted[number]
                self._pass_first(number)
                self._there[number] = pages
                self._loading.add(number)
                self.num_loads += 1
                self._pool.start_load(number)

    def _make_room(self, num_pages: int) -> bool:
        """Evict what is needed for so many pages; False: it would not do, and nothing is."""
        missing = num_pages - self.num_free
        kept = self._users.keys() | self._reserved | self._loading
        victims = []
        for number, pages in self._there.items():
            if missing <= 0:
                break
            if number not in kept:
                victims.append(number)
                missing -= pages
        if missing > 0:
            return False
        assert self._pool is not None, "it has pages"
        for number in victims:
            del self._there[number]
            self._pool.evict(number)
            self.num_evictions += 1
        return True


def waits_for(number: int) -> int:
    """Return the number, of no sequence and no guide, by which an adapter's sequences wait."""
    return -(1 << 62) - number
