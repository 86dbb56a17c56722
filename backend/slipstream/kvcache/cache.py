"""Give running sequences their tables of blocks, and let them share what is already computed.

The scheduler reaches the cache by this module only. A running sequence holds the blocks of its
tables (`CacheState.tables`, one for each layer group, see `core/groups.py`); others hold none.

    match                find the blocks that hold the first tokens of a sequence
    admit                give a sequence tables: the blocks of its match, and new ones
    grow                 add room for one more block of tokens
    fork                 give one sequence the computed tokens of another
    give_back            free the blocks beyond a sequence's tokens
    free_outside_window  free blocks that no later token of the sequence sees
    computed             register blocks that a step has computed, so that others find them
    release              free the tables; a launched step may still touch them, so they are fenced
    launch               count a launched step, and return the block copies that must run first
    complete             count the oldest step as completed
    roll_back            void all launched steps

Whole blocks are shared. If the next block matches in part, it is copied. Shared blocks are never
written: the sequences that share them compute later positions, in blocks of their own. A finite
sample proves that all keys and values before it are finite (a NaN in any of them would reach the
logits), and only then can they be found: see `reuse.py`. An idle block can be found until it is
handed out. Blocks that left the device may be in host memory: see `tier.py`.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice
from time import monotonic_ns

from slipstream_contract.retention import DEFAULT_RETENTION

from slipstream.core.batch import BlockCopy
from slipstream.core.cache_state import CacheState
from slipstream.core.prefix import PrefixIndex
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.figures import EVICTIONS
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.fork import Forks
from slipstream.kvcache.host import Mover
from slipstream.kvcache.reuse import NOT_HERE, PrefixMatch, Reuse
from slipstream.kvcache.tier import HostTier

Copies = tuple[tuple[int, int], ...]


class KVCache:
    """The tables of all sequences, over one pool of blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        is_reused: bool = True,
        clock: Callable[[], int] = monotonic_ns,
        window: AttentionWindow | None = None,
        mover: Mover | None = None,
        token_ns: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Make an empty cache. Without reuse, or with gaps in the tables, nothing is ever found.

        Args:
            num_blocks: blocks on the device.
            block_size: tokens in a block.
            is_reused: whether computed blocks can be found again.
            clock: time in ns.
            window: attention window of the model; None: full attention.
            mover: executes copies to and from host memory; None: there is no host memory.
            token_ns: returns the time that a prompt token takes, or None while it is not measured.
        """
        self.num_blocks = num_blocks
        self.window = window or AttentionWindow()
        self.block_size = block_size
        self._num_full, self._num_local = len(self.window.full), len(self.window.local)
        most = [self.window.max_local_blocks(block_size, ahead) or 0 for ahead in (1, None)]
        self._local_blocks = most  # the fewest and the most that are useful
        self.num_evicted = dict.fromkeys(EVICTIONS, 0)  # blocks by priority
        is_reused = is_reused and not self.window.has_gaps
        mover = mover if is_reused else None
        self._blocks = BlockManager(num_blocks, clock, self._evict, mover is not None)
        self.index = PrefixIndex(block_size)  # of what can be found again
        self._token_ns = token_ns
        self.tier = HostTier(self._blocks, self.index, mover, self._compute_s, self._evict)
        pool = (self._blocks, self.index, self.tier, self.window, block_size)
        self._reuse = Reuse(*pool, is_reused)
        self._forks = Forks(self._blocks, self.index, self.window, block_size)
        self.num_for_fork = self._forks.num_needed
        self.follow_tokens = self._forks.follow_tokens
        self.match = self._reuse.match
        self.computed = self._reuse.computed
        self._copies: list[BlockCopy] = []  # for the next step
        self._launched: deque[list[BlockCopy]] = deque()  # of each step in flight

    @property
    def num_free(self) -> int:
        """Number of blocks that can be handed out now, cached ones included."""
        return self._blocks.num_free

    @property
    def num_fenced(self) -> int:
        """Number of blocks without an owner that a launched step may still touch."""
        return self._blocks.num_fenced

    @property
    def num_cached(self) -> int:
        """Number of idle blocks that hold a prefix."""
        return self._blocks.num_cached

    @property
    def num_unused(self) -> int:
        """Number of blocks that no sequence holds: free now, or as soon as steps and copies end."""
        blocks = self._blocks
        return blocks.num_empty + blocks.num_cached + blocks.num_fenced + blocks.num_moving

    @property
    def num_becoming_free(self) -> int:
        """Number of blocks that become free when steps in flight and copies end."""
        return self._blocks.num_fenced + self._blocks.num_moving

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks without which so many tokens cannot be computed."""
        return self.window.blocks_for(-(-num_tokens // self.block_size), self.block_size, 1)

    # --- tables --------------------------------------------------------------------------------

    def admit(
        self, sequence: Sequence, match: PrefixMatch, num_tokens: int, num_others: int
    ) -> bool:
        """Give a sequence tables for `num_tokens` tokens, or for as many as the whole cache has.

        Returns False and changes nothing if that would leave less than one block in each table for
        each of `num_others` running sequences; blocks may have started to move to host memory then.
        """
        blocks, size = self._blocks, self.block_size
        num_spare = num_others * self.window.num_tables
        match, shared, num_more = self._make_room(sequence, match, num_tokens, num_spare)
        num_fetched = [table.count(NOT_HERE) for table in match.tables]
        num_new = sum(num_more) + sum(num_fetched)
        num_left = blocks.num_free - num_spare - num_new
        # Shared blocks are counted only if they could be too many.
        if num_left < len(shared) and num_left < blocks.num_shareable(shared):
            return False
        blocks.share(shared)
        num_left = blocks.num_free - num_spare - num_new
        is_copied = match.num_copied and blocks.num_shareable(match.sources) <= num_left
        if is_copied:
            blocks.share(match.sources)  # before they might be handed out below
        own = iter(blocks.allocate(num_new))
        for table, found in enumerate(match.tables):
            if num_fetched[table]:
                self._reuse.fetch(sequence, table, found, own)
            found += islice(own, num_more[table])
        sequence.cache.tables = tuple(match.tables)
        sequence.num_computed = match.num_blocks * size
        if is_copied:
            pairs = zip(match.sources, match.tables, strict=True)
            number = match.num_blocks
            sequence.cache.copies = [BlockCopy(source, table[number]) for source, table in pairs]
            self._copies += sequence.cache.copies
            sequence.num_computed += match.num_copied
        sequence.num_scheduled = sequence.num_computed
        sequence.cache.num_outside = match.num_outside
        sequence.cache.capacity = min(map(len, sequence.cache.tables)) * size
        sequence.cache.num_shared_blocks += len(shared) + sum(num_fetched)
        sequence.cache.num_allocated_blocks += sum(num_more)
        self._reuse.admitted(sequence, match.num_blocks)
        self.tier.admitted(sequence, max(num_fetched) * size)
        return True

    def _make_room(
        self, sequence: Sequence, match: PrefixMatch, num_tokens: int, num_spare: int
    ) -> tuple[PrefixMatch, list[int], list[int]]:
        """Return the match, its blocks on the device, and how many more blocks each table needs.

        With host memory, other idle blocks start to leave the device if too few are free.
        """
        shared, num_new, num_more = self._blocks_needed(match, num_tokens)
        if self._blocks.has_host and num_new + num_spare > self.num_free:
            self._blocks.share(shared)
            self.tier.has_room(num_new + num_spare)
            self._blocks.free(reversed(shared))
            most = match.num_copied
            match = self.match(sequence)  # what was found in host memory may have gone
            match.num_copied = min(match.num_copied, most)
            shared, _, num_more = self._blocks_needed(match, num_tokens)
        return match, shared, num_more

    def _blocks_needed(
        self, match: PrefixMatch, num_tokens: int
    ) -> tuple[list[int], int, list[int]]:
        """Return the matched blocks on the device, how many others are needed, and how many more
        each table needs beyond the match.

        What is matched in host memory is needed on the device, too, but is no table's more. Local
        tables also get room for tokens in flight, as far as the cache has it.
        """
        num_full, num_local = self._num_full, self._num_local
        found = self._live_blocks(match)
        num_found = sum(map(len, found))
        shared = [*chain.from_iterable(found)]
        if self._blocks.has_host:
            shared = [block for block in shared if block != NOT_HERE]
        num_left = self.num_blocks - num_found
        num_more = ahead = -(-num_tokens // self.block_size) - match.num_blocks
        if num_local:
            least, most = (number - len(found[-1]) for number in self._local_blocks)
            num_left -= num_local * min(num_more, least)
        if num_full:
            num_more = min(num_more, num_left // num_full)
            num_left -= num_full * num_more
        if num_local:
            ahead = min(ahead, most, min(ahead, least) + num_left // num_local)
        more = [num_more] * num_full + [ahead] * num_local
        return shared, num_found - len(shared) + sum(more), more

    def _compute_s(self) -> float | None:
        """Return the time in s in which a block is computed; None while it is not measured."""
        token_ns = self._token_ns()
        return None if token_ns is None else token_ns * self.block_size / 1e9

    def free_outside_window(self, sequence: Sequence) -> None:
        """Free the blocks that no later token of the sequence sees."""
        outside = self.window.outside(sequence.num_computed, self.block_size)
        start = max(outside.start, sequence.cache.num_outside)
        end = outside.stop - sequence.cache.gap // self.block_size
        if start >= end:
            return
        tables = list(sequence.cache.tables)
        for number in range(self._num_full, len(tables)):
            tables[number] = self._shrink_table(sequence, tables[number], start, end)
        sequence.cache.tables = tuple(tables)
        if self.window.has_gaps:
            sequence.cache.gap += (end - start) * self.block_size
            sequence.is_new = True  # the runner needs the whole new table
        else:
            sequence.cache.num_outside = end
        sequence.cache.capacity = min(map(len, tables)) * self.block_size + sequence.cache.gap

    def _shrink_table(
        self, sequence: Sequence, table: list[int], start: int, end: int
    ) -> list[int]:
        """Return a local table without its blocks `start .. end - 1`.

        Blocks that only this sequence owns and that cannot be found are used again for its next
        tokens, as far as these are known; a sequence that is exempt from preemption takes all of
        them.
        """
        size, blocks, old = self.block_size, self._blocks, table[start:end]
        capacity = len(table) * size + sequence.cache.gap
        num_tokens = min(sequence.num_tokens, sequence.num_computed + self.window.num_ahead)
        num_wanted = max(0, -(-(num_tokens - capacity) // size))
        own = [block for block in old if blocks.is_exclusive(block)]
        again = own if sequence.is_spared else own[:num_wanted]
        blocks.free(block for block in old if block not in again)
        if self.window.has_gaps:
            table = table[:start] + table[end:]
        return table + again

    def shortest_tables(self, sequence: Sequence) -> Collection[list[int]]:
        """Return the tables that must grow before the sequence has room for more tokens."""
        tables = sequence.cache.tables
        if len(tables) == 1:
            return tables
        size = (sequence.cache.capacity - sequence.cache.gap) // self.block_size
        return [table for table in tables if len(table) == size]

    def grow(self, sequence: Sequence, tables: Collection[list[int]]) -> None:
        """Add a free block to each of the sequence's `shortest_tables`."""
        for table in tables:
            table += self._blocks.allocate(1)
        sequence.cache.capacity += self.block_size
        sequence.cache.num_allocated_blocks += len(tables)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` the computed tokens of `parent`; see `fork.py` and `num_for_fork`."""
        self._copies += self._forks.fork(parent, child)

    def give_back(self, sequence: Sequence) -> None:
        """Free the last blocks that none of the sequence's tokens is in, as drafts were wrong."""
        if sequence.is_spared:
            return  # it owns all that it can ever need
        num_left = (sequence.cache.capacity - max(sequence.num_tokens, 1)) // self.block_size
        if num_left <= 0:
            return
        tables = sequence.cache.tables
        for table in tables:
            self._blocks.free(reversed(table[len(table) - num_left :]))
        sequence.cache.tables = tuple(table[: len(table) - num_left] for table in tables)
        sequence.cache.capacity -= num_left * self.block_size
        sequence.is_new = True  # what the runner knows of its tables is too long

    def release(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Free all blocks of a sequence, which has nothing computed from then on.

        If not `is_sound`, none of its blocks can be found any more.
        """
        self._reuse.released(sequence, is_sound)
        self.tier.released(sequence.id)
        for copy in sequence.cache.copies:
            copy.is_void = True
            if copy in self._copies:
                self._copies.remove(copy)
                self._blocks.free([copy.source])
        # The last blocks first: they are evicted first, as they are useless without the others.
        for blocks in self._live_blocks(sequence.cache):
            self._blocks.free(reversed(blocks))
        sequence.cache.clear()
        sequence.num_computed = sequence.num_scheduled = 0

    def _live_blocks(
        self, owner: CacheState | PrefixMatch
    ) -> list[list[int]] | tuple[list[int], ...]:
        """Return the blocks of each table, without entries that have left the window."""
        tables, start = owner.tables, owner.num_outside
        if not start:
            return tables
        return [*tables[: self._num_full], *(table[start:] for table in tables[self._num_full :])]

    # --- steps ---------------------------------------------------------------------------------

    def launch(self) -> Copies:
        """Count a launched step; return the (source, target) block copies that must run first."""
        self._blocks.launch()
        self.tier.make_room_ahead()
        copies, self._copies = self._copies, []
        self._launched.append(copies)
        return tuple((copy.source, copy.target) for copy in copies)

    def complete(self) -> None:
        """Count the oldest launched step as completed."""
        self._blocks.complete()
        if copies := self._launched.popleft():
            self._blocks.free(copy.source for copy in copies)

    def roll_back(self) -> None:
        """Void all launched steps; copies that they should have made are made by the next one."""
        for copies in self._launched:
            self._blocks.complete()
            self._blocks.free(copy.source for copy in copies if copy.is_void)
            self._copies += [copy for copy in copies if not copy.is_void]
        self._launched.clear()

    def _evict(self, blocks: list[int], priority: int) -> None:
        for block in blocks:
            self.index.remove(block)
        above = (priority > DEFAULT_RETENTION) - (priority < DEFAULT_RETENTION)
        self.num_evicted[EVICTIONS[1 + above]] += len(blocks)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that every block is accounted for and no shared block is written. O(blocks)."""
        running = list(running)
        sources = [copy.source for copies in (self._copies, *self._launched) for copy in copies]
        held = {sequence.id: self._live_blocks(sequence.cache) for sequence in running}
        self._blocks.check_integrity(
            [*(blocks for tables in held.values() for blocks in tables), sources]
        )
        self._reuse.check_integrity(running)
        self.tier.check_integrity(self._blocks.moving)
        owners: dict[int, int] = {}
        read: list[tuple[int, int]] = []  # (block, sequence that only reads it)
        for sequence in running:
            place = (sequence.num_computed - sequence.cache.gap) // self.block_size
            shortest = min(map(len, sequence.cache.tables))
            assert sequence.num_scheduled <= sequence.cache.capacity
            assert sequence.cache.capacity == shortest * self.block_size + sequence.cache.gap
            for table, blocks in zip(sequence.cache.tables, held[sequence.id], strict=True):
                num_read = place - len(table) + len(blocks)
                read += [(block, sequence.id) for block in blocks[:num_read]]
                for block in blocks[num_read:]:
                    assert owners.setdefault(block, sequence.id) == sequence.id, "two writers"
        for block, reader in read:
            assert owners.get(block, reader) == reader, "a shared block is written"
