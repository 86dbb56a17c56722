"""Which requests are over time, without a look at those that are not."""

import heapq
from collections.abc import Collection, Iterator

Key = tuple[bytes, int]  # a bridge and its number of a request

_MIN_SWEEP = 1024


class Deadlines:
    """A heap of deadlines. A request that ends earlier stays in it until it is swept or due."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_ns: int, key: Key, alive: Collection[Key]) -> None:
        """One more request; those that are not `alive` are forgotten once they are most of all."""
        if len(self._heap) >= max(_MIN_SWEEP, 2 * len(alive)):
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_ns, key))

    def take_due(self, now_ns: int) -> Iterator[tuple[int, Key]]:
        """Deadline and key of all that are due, each once; some may have ended before."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heapq.heappop(self._heap)
