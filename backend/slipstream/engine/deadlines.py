"""Find the requests whose deadline has passed, without a look at all others."""

import heapq
from collections.abc import Collection, Iterator

Key = tuple[bytes, int]  # bridge, number of the request

_MIN_SWEEP = 1024


class Deadlines:
    """A heap of deadlines. A request that ended earlier stays in it until it is swept or due."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_ns: int, key: Key, alive: Collection[Key]) -> None:
        """Add a deadline, and sweep entries not in `alive` once they are more than half of all."""
        if len(self._heap) >= max(_MIN_SWEEP, 2 * len(alive)):
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_ns, key))

    def take_due(self, now_ns: int) -> Iterator[tuple[int, Key]]:
        """Remove and yield deadlines that are due, and keys, of requests that may have ended."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heapq.heappop(self._heap)
