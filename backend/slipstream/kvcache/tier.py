"""Host memory beneath the cache: idle blocks that would be lost move there, and come back.

With it no idle block is handed out before what it holds has left, unless that is a part of a block,
worth less than all that lies there, or computed again in less time than copied. Some blocks are
kept empty ahead of need. What is found there moves into new blocks, which others may share at once;
a sequence with a block on its way in is not to be scheduled before that has arrived.

Without a `Mover` all of this is nothing, and the cache is as it was.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable

from slipstream.core.prefix import PrefixIndex
from slipstream.core.sequence import Sequence
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.host import Direction, HostMemory, Mover, Worth

_EMPTY_SHARE = 16  # one of so many blocks is kept empty, if it can be


class Tier:
    """The moves between a pool of blocks on the device and host memory."""

    def __init__(
        self,
        blocks: BlockManager,
        index: PrefixIndex,
        mover: Mover | None,
        compute_s: Callable[[], float | None],
        evict: Callable[[list[int], int], None],
    ) -> None:
        """`compute_s` tells how long a block's tokens take; `evict` blocks and their priority."""
        self.counts = Counter[str]()  # by the names of `slipstream.figures`
        self._blocks = blocks
        self._index = index
        self._host = None if mover is None else HostMemory(mover)
        self._compute_s = compute_s
        self._evict = evict
        self._arrivals: dict[int, int] = {}  # sequence id -> the arrival that it waits for

    @property
    def is_moving(self) -> bool:
        """Is anything on its way to or from host memory?"""
        return self._host is not None and self._host.is_moving

    @property
    def not_arrived(self) -> Collection[int]:
        """Ids of the sequences some of whose blocks are on their way in."""
        return self._arrivals

    def is_arriving(self, block: int) -> bool:
        """Is what the block is to hold on its way in?"""
        return self._host is not None and block in self._host.arriving

    def fetchable(self) -> Container[bytes]:
        """Digests of the blocks in host memory, if they are fetched in less time than computed."""
        return self._host if self._host is not None and self._is_faster(Direction.IN) else ()

    # --- out -----------------------------------------------------------------------------------

    def has_room(self, num_blocks: int) -> bool:
        """Are so many free? If not, and that is enough, those that are kept begin to leave."""
        blocks = self._blocks
        if self._host is None or num_blocks <= blocks.num_free:
            return num_blocks <= blocks.num_free
        if num_blocks <= blocks.num_free + self._num_leaving() + blocks.num_kept:
            self._make_room(num_blocks)
        return num_blocks <= blocks.num_free

    def make_room_ahead(self) -> None:
        """Let idle blocks leave so that some are empty before they are needed."""
        if self._host is not None:
            self._make_room(self._blocks.num_blocks // _EMPTY_SHARE)

    def forget(self, digests: Iterable[bytes]) -> None:
        """The device has these: they need not lie here, too."""
        if self._host is not None:
            for digest in digests:
                self._host.drop(digest)

    def _num_leaving(self) -> int:
        """Blocks that will be empty once their copies have ended, unless they are wanted again."""
        assert self._host is not None
        return sum([not self._blocks.is_wanted(block) for block in self._host.leaving])

    def _make_room(self, num_blocks: int) -> None:
        """Let idle blocks leave until so many are free, or will be once copies have ended."""
        host, blocks = self._host, self._blocks
        assert host is not None
        num_short = num_blocks - blocks.num_free
        if num_short <= 0 or not blocks.num_kept:
            return
        num_short = min(num_short - self._num_leaving(), blocks.num_kept)
        is_worth_it = self._is_faster(*Direction)
        for _ in range(num_short):
            block, *worth = blocks.take_kept()
            digest = self._index.digest(block)
            if not (is_worth_it and digest and host.send(digest, Worth(*worth), block)):
                self._evict([block], worth[0])
                blocks.end_move(block, has_left=True)

    # --- in ------------------------------------------------------------------------------------

    def fetch(self, block: int, parent: bytes, digest: bytes, tokens: bytes) -> None:
        """Begin to move what lies here into a block of the caller's, which is found from now on."""
        host, blocks = self._host, self._blocks
        assert host is not None
        priority, duration_ns = host.fetch(digest, block)
        self._index.put(block, parent, digest, tokens)
        blocks.keep([block])
        blocks.retain(block, priority, duration_ns)
        blocks.begin_move(block)

    def admitted(self, sequence: Sequence, num_fetched: int) -> None:
        """It has its blocks, so many tokens of them from here, and waits for those to arrive."""
        self.counts["found_tokens:host"] += num_fetched
        self.counts["found_tokens:device"] += sequence.num_computed - num_fetched
        if self._host is None:
            return
        arriving = self._host.arriving
        if not all(map(arriving.isdisjoint, sequence.tables)):
            self._arrivals[sequence.id] = self._host.last_arrival

    def released(self, sequence_id: int) -> None:
        """A sequence has no blocks any more."""
        self._arrivals.pop(sequence_id, None)

    # --- copies --------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in which moves have ended."""
        host, blocks, counts = self._host, self._blocks, self.counts
        if host is None or not host.is_moving:
            return
        landed = host.poll(blocks.is_wanted)
        for block in landed.left:
            self._index.remove(block)
            blocks.end_move(block, has_left=True)
        for block in (*landed.stayed, *landed.arrived):
            blocks.end_move(block)
        num_out = len(landed.left) + len(landed.stayed)
        counts["moved_blocks:out"] += len(landed.left)
        counts["moved_blocks:in"] += len(landed.arrived)
        counts["moved_bytes:out"] += num_out * host.block_bytes
        counts["moved_bytes:in"] += len(landed.arrived) * host.block_bytes
        counts["host_evicted_blocks"] = host.num_evicted
        if landed.arrived:
            self._arrivals = {i: n for i, n in self._arrivals.items() if not host.has_arrived(n)}

    def begin(self) -> None:
        """Begin what was decided since the last time."""
        if self._host is not None:
            self._host.begin()

    def wait(self) -> None:
        """Until some move has ended, if any is under way."""
        if self._host is not None:
            self._host.wait()

    def _is_faster(self, *directions: Direction) -> bool:
        """Is a block copied so in less time than it is computed again?"""
        assert self._host is not None
        return self._host.is_faster(self._compute_s(), *directions)

    # --- figures -------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Blocks by where they are, by the names of `slipstream.figures`."""
        host = self._host
        return {
            "host_blocks_free": 0 if host is None else host.num_free,
            "host_blocks_cached": 0 if host is None else host.num_full,
            "host_blocks_leaving": 0 if host is None else len(host.leaving),
            "host_blocks_arriving": 0 if host is None else len(host.arriving),
        }

    def check_integrity(self, moving: Collection[int]) -> None:
        """Nothing is in two places; `moving`: what the pool believes. O(blocks)."""
        if self._host is not None:
            self._host.check_integrity()
            assert moving == self._host.leaving | self._host.arriving
            assert not any(digest in self._host for digest in self._index.digests())
