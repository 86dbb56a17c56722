"""Find the requests whose deadline has passed, without a look at all others."""

import heapq
from collections.abc import Collection, Iterator

from slipstream.core.sequence import Request
from slipstream.core.stop import Ending
from slipstream.wire import FinishReason

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


def overdue(request: Request, late_ns: int) -> Ending:
    """Return the ending of a request whose deadline passed so long ago."""
    is_waiting = not request.sequences[0].first_scheduled_ns
    num_tokens = sum(max(s.num_outputs, s.num_sent) for s in request.sequences)
    asked_ms, late_ms = request.message.timeout_ns / 1e6, late_ns / 1e6
    so_far = "it was waiting" if is_waiting else f"{num_tokens} tokens were generated"
    error = (
        f"{asked_ms + late_ms:.0f} ms have passed, of {asked_ms:.12g} asked for by "
        f"timeout_ms or timeout; {so_far}"
    )
    return Ending(FinishReason.DEADLINE, error=error)
