"""Move idle cached blocks to host memory instead of losing them, and fetch them on a prefix hit.

With host memory, a cached block is handed out only after its content has left. It is evicted
instead if it is partly filled, worth less than everything in host memory, or faster to compute than
to copy. Some blocks are kept empty ahead of need. A block found in host memory is fetched into a
new block, which other sequences may share at once; a sequence with a block on its way is not
scheduled before it has arrived.

Without a `Mover` every method does nothing, and the cache is on the device only.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable

from slipstream.core.prefix import PrefixIndex
from slipstream.core.sequence import Sequence
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.host import Direction, HostMemory, Mover, Worth

_EMPTY_SHARE = 16  # 1 / _EMPTY_SHARE of all blocks are emptied ahead of need


class HostTier:
    """The moves between a pool of blocks on the device and host memory."""

    def __init__(
        self,
        blocks: BlockManager,
        index: PrefixIndex,
        mover: Mover | None,
        compute_s: Callable[[], float | None],
        evict: Callable[[list[int], int], None],
    ) -> None:
        """Connect the pool and its index to host memory.

        Args:
            blocks: the pool.
            index: content of the pool's blocks.
            mover: executes copies; None: there is no host memory.
            compute_s: returns the time in s in which a block is computed; None: not measured.
            evict: called with blocks whose content is lost, and their priority.
        """
        self.counts = Counter[str]()  # by the names of `slipstream.figures`
        self._blocks = blocks
        self._index = index
        self._host = None if mover is None else HostMemory(mover, self._gone)
        self._compute_s = compute_s
        self._evict = evict
        self._arrivals: dict[int, int] = {}  # sequence id -> arrival that it waits for

    @property
    def is_moving(self) -> bool:
        """Whether anything is moving to or from host memory."""
        return self._host is not None and self._host.is_moving

    @property
    def not_arrived(self) -> Collection[int]:
        """Ids of the sequences that wait for blocks from host memory."""
        return self._arrivals

    def is_arriving(self, block: int) -> bool:
        """Return whether a block's content is still on its way from host memory."""
        return self._host is not None and block in self._host.arriving

    def fetchable(self) -> Container[bytes]:
        """Return the digests in host memory; empty if computing is faster than fetching."""
        return self._host if self._host is not None and self._is_faster(Direction.IN) else ()

    # --- out -----------------------------------------------------------------------------------

    def has_room(self, num_blocks: int) -> bool:
        """Return whether so many blocks are free; if not, start to move cached ones out."""
        blocks = self._blocks
        if self._host is None or num_blocks <= blocks.num_free:
            return num_blocks <= blocks.num_free
        if num_blocks <= blocks.num_free + self._num_leaving() + blocks.num_cached:
            self._make_room(num_blocks)
        return num_blocks <= blocks.num_free

    def make_room_ahead(self) -> None:
        """Start to move cached blocks out, so that some are empty before they are needed."""
        if self._host is not None:
            self._make_room(self._blocks.num_blocks // _EMPTY_SHARE)

    def discard(self, digests: Iterable[bytes]) -> None:
        """Remove blocks from host memory that the device has computed."""
        if self._host is not None:
            for digest in digests:
                self._host.discard(digest)

    def _gone(self, digest: Hashable) -> None:
        if (events := self._index.events) is not None:
            assert isinstance(digest, bytes)
            events.remove_from_host(digest)

    def _num_leaving(self) -> int:
        """Return how many blocks will be empty after their copies, unless shared again."""
        assert self._host is not None
        return sum([not self._blocks.is_busy(block) for block in self._host.leaving])

    def _make_room(self, num_blocks: int) -> None:
        """Start to move cached blocks out until `num_blocks` are free or will be."""
        host, blocks = self._host, self._blocks
        assert host is not None
        num_short = num_blocks - blocks.num_free
        if num_short <= 0 or not blocks.num_cached:
            return
        num_short = min(num_short - self._num_leaving(), blocks.num_cached)
        is_worth_it = self._is_faster(*Direction)
        for _ in range(num_short):
            block, *worth = blocks.take_least_valuable()
            digest = self._index.digest(block)
            if not (is_worth_it and digest and host.send(digest, Worth(*worth), block)):
                self._evict([block], worth[0])
                blocks.finish_move(block, has_left=True)

    # --- in ------------------------------------------------------------------------------------

    def fetch(
        self, block: int, parent: bytes, digest: bytes, tokens: bytes, adapter: str | None
    ) -> None:
        """Start to move a block from host memory into `block`, which can be found from now on."""
        host, blocks = self._host, self._blocks
        assert host is not None
        self._index.put(block, parent, digest, tokens, adapter)
        priority, duration_ns = host.fetch(digest, block)
        blocks.mark_cached([block])
        blocks.retain(block, priority, duration_ns)
        blocks.start_move(block)

    def admitted(self, sequence: Sequence, num_fetched: int) -> None:
        """Count the prefix hit of an admitted sequence, with `num_fetched` tokens fetched."""
        self.counts["found_tokens:host"] += num_fetched
        self.counts["found_tokens:device"] += sequence.num_computed - num_fetched
        if self._host is None:
            return
        arriving = self._host.arriving
        if not all(map(arriving.isdisjoint, sequence.cache.tables)):
            self._arrivals[sequence.id] = self._host.last_arrival

    def released(self, sequence_id: int) -> None:
        """Stop waiting for the blocks of a sequence that was released."""
        self._arrivals.pop(sequence_id, None)

    # --- copies --------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of the moves that have ended."""
        host, blocks, counts = self._host, self._blocks, self.counts
        if host is None or not host.is_moving:
            return
        ended = host.poll(self._is_left)
        for block in ended.left:
            self._index.remove(block, is_in_host=True)
            blocks.finish_move(block, has_left=True)
        for block in (*ended.stayed, *ended.arrived):
            blocks.finish_move(block)
        num_out = len(ended.left) + len(ended.stayed)
        counts["moved_blocks:out"] += len(ended.left)
        counts["moved_blocks:in"] += len(ended.arrived)
        counts["moved_bytes:out"] += num_out * host.block_bytes
        counts["moved_bytes:in"] += len(ended.arrived) * host.block_bytes
        counts["host_evicted_blocks"] = host.num_evicted
        if ended.arrived:
            self._arrivals = {i: n for i, n in self._arrivals.items() if not host.has_arrived(n)}

    def _is_left(self, block: int, digest: Hashable) -> bool:
        """Return whether a copied block is idle, and still what was copied: a sequence that shared
        it meanwhile may have failed, or have written to it.
        """
        index = self._index
        is_same = block in index and index.digest(block) == digest
        return is_same and not self._blocks.is_busy(block)

    def start_copies(self) -> None:
        """Start the copies that were queued since the last call."""
        if self._host is not None:
            self._host.start_copies()

    def wait(self) -> None:
        """Wait until a move has ended, if any is under way."""
        if self._host is not None:
            self._host.wait()

    def _is_faster(self, *directions: Direction) -> bool:
        """Return whether a block is copied in these directions in less time than it is computed."""
        assert self._host is not None
        return self._host.is_faster(self._compute_s(), *directions)

    # --- figures -------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return numbers of blocks by place, by the names of `slipstream.figures`."""
        host = self._host
        return {
            "host_blocks_free": 0 if host is None else host.num_free,
            "host_blocks_cached": 0 if host is None else host.num_full,
            "host_blocks_leaving": 0 if host is None else len(host.leaving),
            "host_blocks_arriving": 0 if host is None else len(host.arriving),
        }

    def check_integrity(self, moving: Collection[int]) -> None:
        """Assert that no block is in two places, and that the pool marks what moves. O(blocks)."""
        if self._host is not None:
            self._host.check_integrity()
            assert moving == self._host.leaving | self._host.arriving
            assert not any(digest in self._host for digest in self._index.digests())
