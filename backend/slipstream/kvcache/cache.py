"""What of a sequence is computed already, and in which blocks: the scheduler's only way to them.

A running sequence holds the blocks of its tables (`Sequence.tables`: one for each group of layers,
see groups.py), others hold none.

    match     which blocks hold the beginning of a sequence's tokens
    admit     tables with room for so many tokens: those blocks, and new ones
    grow      room for one more block of tokens
    forget    what none of its next tokens sees is not its any more
    computed  a step computed more of it, and what it sampled is a number: others may find it
    release   the tables are gone; launched steps may still touch them, so they are fenced
    launch    a step begins, with the copies of blocks that must come before it
    complete  the oldest step has ended; `roll_back`: all launched ones are void

Whole blocks are shared; of the next one, what still matches is copied. Shared blocks are never
written: who shares them computes at later positions, in blocks of its own. A finite sample proves
that all keys and values before it are finite (a NaN in any of them would be in it), and only then
they can be found: see reuse.py. An idle block is found until it is handed out to somebody.
What is not here may lie in host memory: see tier.py.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice
from sys import maxsize
from time import monotonic_ns

from slipstream_contract.retention import DEFAULT_RETENTION

from slipstream.core.batch import BlockCopy
from slipstream.core.prefix import PrefixIndex
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.figures import EVICTIONS
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.host import Mover
from slipstream.kvcache.reuse import NOT_HERE, Match, Reuse
from slipstream.kvcache.tier import Tier

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
        """Without reuse, or with gaps in the tables, nothing is found.

        Args:
            num_blocks: on the device.
            block_size: in tokens.
            is_reused: can what is computed be found again?
            clock: in ns.
            window: what of a sequence its next tokens see.
            mover: what host memory there is.
            token_ns: how long a token of a prompt takes, if that is known.
        """
        self.num_blocks = num_blocks
        self.window = window or AttentionWindow()
        self.block_size = block_size
        self._num_full, self._num_local = len(self.window.full), len(self.window.local)
        most = [self.window.max_local_blocks(block_size, ahead) or 0 for ahead in (1, None)]
        self._local_blocks = most  # without which no token is computed, and that have a use
        self.num_evicted = dict.fromkeys(EVICTIONS, 0)  # blocks handed out that held something
        is_reused = is_reused and not self.window.has_gaps
        mover = mover if is_reused else None
        self._blocks = BlockManager(num_blocks, clock, self._evict, mover is not None)
        self._index = PrefixIndex(block_size)
        self._token_ns = token_ns
        self.tier = Tier(self._blocks, self._index, mover, self._compute_s, self._evict)
        pool = (self._blocks, self._index, self.tier, self.window, block_size)
        self._reuse = Reuse(*pool, is_reused)
        self.match = self._reuse.match
        self.computed = self._reuse.computed
        self._copies: list[BlockCopy] = []  # that no step has done yet
        self._launched: deque[list[BlockCopy]] = deque()  # by the steps in flight

    @property
    def num_free(self) -> int:
        """Blocks that can be had now, those that are kept among them."""
        return self._blocks.num_free

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody owns and a launched step may still touch."""
        return self._blocks.num_fenced

    @property
    def num_kept(self) -> int:
        """Idle blocks that hold what may be asked for again."""
        return self._blocks.num_kept

    @property
    def num_unused(self) -> int:
        """Blocks that no sequence holds: they can be had, now or later."""
        blocks = self._blocks
        return blocks.num_empty + blocks.num_kept + blocks.num_fenced + blocks.num_moving

    @property
    def num_coming(self) -> int:
        """Blocks that will be free without anybody's doing."""
        return self._blocks.num_fenced + self._blocks.num_moving

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks without which so many tokens cannot be computed."""
        return self.window.blocks_for(-(-num_tokens // self.block_size), self.block_size, 1)

    # --- tables --------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, match: Match, num_tokens: int, num_others: int) -> bool:
        """Give a sequence room for so many tokens, or for as many as the cache has.

        False, and nothing has changed, if then not each of `num_others` could grow; with host
        memory blocks may have begun to move there.
        """
        blocks, size = self._blocks, self.block_size
        num_spare = num_others * self.window.num_tables
        match, shared, num_more = self._make_room(sequence, match, num_tokens, num_spare)
        num_fetched = [table.count(NOT_HERE) for table in match.tables]
        num_new = sum(num_more) + sum(num_fetched)
        num_left = blocks.num_free - num_spare - num_new
        # Who is shared is counted only if that can be too many.
        if num_left < len(shared) and num_left < blocks.num_shareable(shared):
            return False
        blocks.share(shared)
        num_left = blocks.num_free - num_spare - num_new
        is_copied = match.num_copied and blocks.num_shareable(match.sources) <= num_left
        if is_copied:
            blocks.share(match.sources)  # or they might be handed out here
        own = iter(blocks.allocate(num_new))
        for table, found in enumerate(match.tables):
            if num_fetched[table]:
                self._reuse.fetch(sequence, table, found, own)
            found += islice(own, num_more[table])
        sequence.tables = tuple(match.tables)
        sequence.num_computed = match.num_blocks * size
        if is_copied:
            pairs = zip(match.sources, match.tables, strict=True)
            number = match.num_blocks
            sequence.copies = [BlockCopy(source, table[number]) for source, table in pairs]
            self._copies += sequence.copies
            sequence.num_computed += match.num_copied
        sequence.num_scheduled = sequence.num_computed
        sequence.num_outside = match.num_outside
        sequence.capacity = min(map(len, sequence.tables)) * size
        sequence.num_shared_blocks += len(shared) + sum(num_fetched)
        sequence.num_allocated_blocks += sum(num_more)
        self._reuse.begin(sequence, match.num_blocks)
        self.tier.admitted(sequence, max(num_fetched) * size)
        return True

    def _make_room(
        self, sequence: Sequence, match: Match, num_tokens: int, num_spare: int
    ) -> tuple[Match, list[int], list[int]]:
        """The match, the blocks of it that are here, and how many more each table needs.

        Where there are too few, others begin to leave for host memory, but none of these.
        """
        shared, num_new, num_more = self._needs(match, num_tokens)
        if self._blocks.has_host and num_new + num_spare > self.num_free:
            self._blocks.share(shared)
            self.tier.has_room(num_new + num_spare)
            self._blocks.free(reversed(shared))
            match = self.match(sequence)  # what was found there may have gone
            shared, _, num_more = self._needs(match, num_tokens)
        return match, shared, num_more

    def _needs(self, match: Match, num_tokens: int) -> tuple[list[int], int, list[int]]:
        """The blocks that are here, how many others are needed, and how many of these are not of
        the match, by table.

        Local tables get room for what is in flight, too, as far as the cache has it.
        """
        num_full, num_local = self._num_full, self._num_local
        found = self._held(match)
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
        """How long a block of a prompt takes, if that is known."""
        token_ns = self._token_ns()
        return None if token_ns is None else token_ns * self.block_size / 1e9

    def forget(self, sequence: Sequence) -> None:
        """Give back what none of its next tokens sees."""
        gone = self.window.outside(sequence.num_computed, self.block_size)
        begin = max(gone.start, sequence.num_outside)
        end = gone.stop - sequence.gap // self.block_size
        if begin >= end:
            return
        tables = list(sequence.tables)
        for number in range(self._num_full, len(tables)):
            tables[number] = self._forget(sequence, tables[number], begin, end)
        sequence.tables = tuple(tables)
        if self.window.has_gaps:
            sequence.gap += (end - begin) * self.block_size
            sequence.is_new = True  # all of its table is
        else:
            sequence.num_outside = end
        sequence.capacity = min(map(len, tables)) * self.block_size + sequence.gap

    def _forget(self, sequence: Sequence, table: list[int], begin: int, end: int) -> list[int]:
        """A local table without these blocks of it.

        What nobody else has, nor can find, it takes for the tokens to come, as far as they are
        known; one that is spared takes all of it.
        """
        size, blocks, old = self.block_size, self._blocks, table[begin:end]
        capacity = len(table) * size + sequence.gap
        num_tokens = min(sequence.num_tokens, sequence.num_computed + self.window.num_ahead)
        num_wanted = max(0, -(-(num_tokens - capacity) // size))
        own = [block for block in old if blocks.is_exclusive(block)]
        again = own if sequence.is_spared else own[:num_wanted]
        blocks.free(block for block in old if block not in again)
        if self.window.has_gaps:
            table = table[:begin] + table[end:]
        return table + again

    def shortest(self, sequence: Sequence) -> Collection[list[int]]:
        """Its tables without which no more tokens have room."""
        tables = sequence.tables
        if len(tables) == 1:
            return tables
        size = (sequence.capacity - sequence.gap) // self.block_size
        return [table for table in tables if len(table) == size]

    def grow(self, sequence: Sequence, tables: Collection[list[int]]) -> None:
        """Room for one block more of tokens, in its `shortest` tables; each takes a free one."""
        for table in tables:
            table += self._blocks.allocate(1)
        sequence.capacity += self.block_size
        sequence.num_allocated_blocks += len(tables)

    def release(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Take all blocks from a sequence; what it has computed counts no more.

        If not sound, nothing of what it had is found any more.
        """
        self._reuse.end(sequence, is_sound)
        self.tier.released(sequence.id)
        for copy in sequence.copies:
            copy.is_void = True
            if copy in self._copies:
                self._copies.remove(copy)
                self._blocks.free([copy.source])
        sequence.copies = []
        # The last ones first: they are handed out first, and are worth nothing without the others.
        for blocks in self._held(sequence):
            self._blocks.free(reversed(blocks))
        sequence.tables = ()  # new ones later: rows in flight keep the old ones
        sequence.num_outside = sequence.gap = 0
        sequence.capacity = sequence.num_computed = sequence.num_scheduled = 0
        sequence.is_proven = False
        sequence.register_at = maxsize

    def _held(self, owner: Sequence | Match) -> list[list[int]] | tuple[list[int], ...]:
        """The blocks of its tables without what is forgotten."""
        tables, begin = owner.tables, owner.num_outside
        if not begin:
            return tables
        return [*tables[: self._num_full], *(table[begin:] for table in tables[self._num_full :])]

    # --- steps ---------------------------------------------------------------------------------

    def launch(self) -> Copies:
        """A step begins that may touch all tables; what must be copied before, from and to."""
        self._blocks.launch()
        self.tier.make_room_ahead()
        copies, self._copies = self._copies, []
        self._launched.append(copies)
        return tuple((copy.source, copy.target) for copy in copies)

    def complete(self) -> None:
        """The oldest launched step has ended."""
        self._blocks.complete()
        if copies := self._launched.popleft():
            self._blocks.free(copy.source for copy in copies)

    def roll_back(self) -> None:
        """All launched steps are void: what they should have copied must be copied again."""
        for copies in self._launched:
            self._blocks.complete()
            self._blocks.free(copy.source for copy in copies if copy.is_void)
            self._copies += [copy for copy in copies if not copy.is_void]
        self._launched.clear()

    def _evict(self, blocks: list[int], priority: int) -> None:
        for block in blocks:
            self._index.remove(block)
        above = (priority > DEFAULT_RETENTION) - (priority < DEFAULT_RETENTION)
        self.num_evicted[EVICTIONS[1 + above]] += len(blocks)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every block accounted for, no shared one written. O(blocks)."""
        running = list(running)
        sources = [copy.source for copies in (self._copies, *self._launched) for copy in copies]
        held = {sequence.id: self._held(sequence) for sequence in running}
        self._blocks.check_integrity(
            [*(blocks for tables in held.values() for blocks in tables), sources]
        )
        self._reuse.check_integrity(running)
        self.tier.check_integrity(self._blocks.moving)
        owners: dict[int, int] = {}
        read: list[tuple[int, int]] = []  # blocks, and who does not write to them
        for sequence in running:
            place = (sequence.num_computed - sequence.gap) // self.block_size
            shortest = min(map(len, sequence.tables))
            assert sequence.num_scheduled <= sequence.capacity
            assert sequence.capacity == shortest * self.block_size + sequence.gap
            for table, blocks in zip(sequence.tables, held[sequence.id], strict=True):
                num_read = place - len(table) + len(blocks)
                read += [(block, sequence.id) for block in blocks[:num_read]]
                for block in blocks[num_read:]:
                    assert owners.setdefault(block, sequence.id) == sequence.id, "two writers"
        for block, reader in read:
            assert owners.get(block, reader) == reader, "a shared block is written"
