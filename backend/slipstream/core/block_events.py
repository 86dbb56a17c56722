"""Record, in order, which whole blocks can be found from now on and which no more, for publishers.

The thread of the engine appends and another one takes; nothing waits. A record that is not taken in
time is given up as a whole, and says so: what is published after that claims too little, never too
much.
"""

from collections import deque
from typing import Literal, NamedTuple

Medium = Literal["GPU", "CPU"]  # the device and host memory, in vLLM's words

_MOST = 1 << 16  # entries that nobody has taken


class Stored(NamedTuple):
    """A block that can be found."""

    medium: Medium
    digest: bytes
    parent: bytes | None  # digest of the block before it; None: it is the first
    token_ids: bytes  # 4 bytes each
    adapter: str  # the name; empty: none


class Removed(NamedTuple):
    """A block that is no more in that medium."""

    medium: Medium
    digest: bytes


class Lost(NamedTuple):
    """Entries that nobody took in time, of blocks that are not told again."""


Event = Stored | Removed | Lost


class BlockEvents:
    """The entries since the last `take`, `_MOST` at most."""

    def __init__(self) -> None:
        self.roots: set[bytes] = set()  # what the chains of each adapter start with
        self._in_host: set[bytes] = set()
        self._events: deque[Event] = deque()

    def store(
        self, medium: Medium, digest: bytes, parent: bytes, token_ids: bytes, adapter: str
    ) -> None:
        """Record a block that can be found."""
        if medium == "CPU":
            self._in_host.add(digest)
        before = None if parent in self.roots else parent
        self._append(Stored(medium, digest, before, token_ids, adapter))

    def remove(self, digest: bytes) -> None:
        """Record a block that is no more on the device."""
        self._append(Removed("GPU", digest))

    def remove_from_host(self, digest: bytes) -> None:
        """Record a block that is no more in host memory, if it was recorded there."""
        if digest in self._in_host:
            self._in_host.remove(digest)
            self._append(Removed("CPU", digest))

    def _append(self, event: Event) -> None:
        if len(self._events) >= _MOST:
            self._events.clear()
            self._events.append(Lost())
        self._events.append(event)

    def take(self, most: int) -> list[Event]:
        """Take the oldest entries, `most` at most; any one thread may call this."""
        taken: list[Event] = []
        try:
            while len(taken) < most:
                taken.append(self._events.popleft())
        except IndexError:
            pass
        return taken
