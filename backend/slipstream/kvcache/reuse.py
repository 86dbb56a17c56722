"""Find the blocks that hold the first tokens of a sequence, and register blocks to be found.

Each table (see `core/groups.py`) has its own block for the same tokens; its key is the digest of
all tokens up to the block's end, marked with the table. A prefix is found if all tables have it:
tables with full attention from the first block on, local tables as far as the window of the next
token reaches.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from slipstream.core.prefix import DigestChain, PrefixIndex, split
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.tier import HostTier

NOT_HERE = -1  # a block that is in host memory


@dataclass(slots=True)
class PrefixMatch:
    """The part of a sequence that the cache already has."""

    num_blocks: int = 0  # of each table
    tables: list[list[int]] = field(default_factory=list)  # blocks, or `NOT_HERE`
    num_outside: int = 0  # leading entries of local tables: placeholders, never read
    sources: list[int] = field(default_factory=list)  # for each table, a block that starts
    num_copied: int = 0  # with this many further tokens
    leader: Sequence | None = None  # computes `num_leader_tokens` more of the same tokens
    num_leader_tokens: int = 0


class Reuse:
    """The keys of blocks, and the sequences that are computing prefixes that others wait for."""

    def __init__(
        self,
        blocks: BlockManager,
        index: PrefixIndex,
        tier: HostTier,
        window: AttentionWindow,
        block_size: int,
        is_on: bool,
    ) -> None:
        """Start with an empty index; if not `is_on`, nothing is ever found."""
        self._blocks = blocks
        self._index = index
        self._tier = tier
        self._window = window
        self._size = block_size
        self._full, self._local = window.full, window.local
        self._is_on = is_on
        self._leaders: dict[bytes, Sequence] = {}  # `Sequence.lead_digest` -> sequence

    def can_share(self, sequence: Sequence) -> bool:
        """Return whether a sequence can share blocks.

        With a window, a sequence frees shared blocks and needs new ones in their place. One that is
        exempt from preemption has to own all its blocks, so it shares none.
        """
        return self._is_on and not (self._window.size and sequence.is_spared)

    # --- match ---------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest computed prefix of a sequence's known tokens, the last one excluded."""
        window, size, last = self._window, self._size, sequence.num_known - 1
        match = PrefixMatch(tables=[[] for _ in range(window.num_tables)])
        if not self.can_share(sequence) or sequence.is_read_anew:
            return match
        digests, most = self._chain(sequence).digests, last // size
        number = most
        for table in self._full:
            match.tables[table] = self._find(digests[1 : number + 1], table)
            number = len(match.tables[table])
        if window.size:
            number = self._num_visible(digests, number)
            first = match.num_outside = window.outside(number * size, size).stop
            for table in self._full:
                del match.tables[table][number:]
            for table in self._local:
                match.tables[table] = [0] * first + self._find(
                    digests[first + 1 : number + 1], table
                )
        match.num_blocks = number
        rest = sequence.ids(number * size, min((number + 1) * size, last))
        self._match_rest(match, digests[number], rest.tobytes())
        if number < most and (leader := self._leaders.get(digests[number + 1])) is not None:
            match.leader = leader
            theirs = self._chain(leader).digests
            both = range(number, min(most, len(theirs) - 1) + 1)
            end = bisect_left(both, True, key=lambda i: digests[i] != theirs[i])
            match.num_leader_tokens = (end - 1) * size
        return match

    def _find(self, digests: list[bytes], table: int) -> list[int]:
        """Return the blocks up to the first missing one; `NOT_HERE` for one in host memory."""
        keys = digests if table == 0 else (_key(digest, table) for digest in digests)
        return list(iter(map(self._finder(), keys).__next__, None))

    def _finder(self) -> Callable[[bytes], int | None]:
        """Return a function from key to block, `NOT_HERE` (in host memory), or None."""
        find, elsewhere = self._index.find, self._tier.fetchable()

        def find_both(key: bytes) -> int | None:
            block = find(key)
            return NOT_HERE if block is None and key in elsewhere else block

        return find_both if elsewhere else find

    def _num_visible(self, digests: list[bytes], number: int) -> int:
        """Return the most blocks, up to `number`, after which no visible block is missing.

        Only local tables are searched: O(blocks) each, O(window) if no block is missing.
        """
        find, size = self._finder(), self._size
        while number:
            first = self._window.outside(number * size, size).stop
            if first == number:
                return 0  # the window is empty
            keys = (
                (i, _key(digests[i + 1], table))
                for table in self._local
                for i in range(number - 1, first - 1, -1)
            )
            missing = (i for i, key in keys if find(key) is None)
            hole = next(missing, None)
            if hole is None:
                return number
            number = hole
        return 0

    def _match_rest(self, match: PrefixMatch, digest: bytes, rest: bytes) -> None:
        """Find how much of the next block all tables have."""
        tables = range(self._window.num_tables)
        found = [self._index.closest(_key(digest, table), rest) for table in tables]
        match.sources = [source for source, _ in found]
        match.num_copied = min(count for _, count in found)
        if any(map(self._tier.is_arriving, match.sources)):
            match.num_copied = 0  # it is not there yet

    # --- index ---------------------------------------------------------------------------------

    def _chain(self, sequence: Sequence) -> DigestChain:
        """Return the digests of a sequence's whole blocks; siblings share the prompt's."""
        request, chain = sequence.request, sequence.cache.chain
        if chain is None:
            if request.chain is None:
                digest = b"" if request.adapter is None else request.adapter.digest
                request.chain = self._index.chain(request.message.cache_salt, digest)
                self._extend(request.chain, sequence, sequence.num_prompt)
            is_alone = len(request.sequences) == 1
            chain = sequence.cache.chain = request.chain if is_alone else request.chain.copy()
        self._extend(chain, sequence, sequence.num_known)
        return chain

    def _extend(self, chain: DigestChain, sequence: Sequence, num_tokens: int) -> None:
        """Extend the chain by the sequence's whole blocks up to `num_tokens` tokens."""
        start, end = chain.num_blocks * self._size, num_tokens // self._size * self._size
        if start < end:
            chain.extend(sequence.ids(start, end).tobytes())

    def fetch(self, sequence: Sequence, table: int, found: list[int], own: Iterator[int]) -> None:
        """Fetch the blocks of a table that are in host memory into the next blocks of `own`."""
        digests, size = self._chain(sequence).digests, self._size
        adapter = _adapter_of(sequence)
        for i, block in enumerate(found):
            if block == NOT_HERE:
                found[i] = next(own)
                parent, key = (_key(digest, table) for digest in digests[i : i + 2])
                tokens = sequence.ids(i * size, (i + 1) * size).tobytes()
                self._tier.fetch(found[i], parent, key, tokens, adapter)
        if table == 0:
            self._index.add_segments(digests, range(len(found)))

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """Register a sequence that shares `num_found` blocks of each table, computing the rest."""
        if not self.can_share(sequence):
            return
        self._retain(sequence, 0, num_found)
        sequence.cache.num_registered = num_found
        sequence.cache.register_at = 0
        digests = self._chain(sequence).digests
        if num_found + 1 < len(digests):
            sequence.cache.lead_digest = digests[num_found + 1]
            self._leaders.setdefault(sequence.cache.lead_digest, sequence)

    def computed(self, sequence: Sequence) -> None:
        """Register what a sequence has computed; see `KVCache.computed`."""
        self._register(sequence)
        if not sequence.cache.is_proven:
            sequence.cache.is_proven = True
            self._register_rest(sequence)
            self._remove_leader(sequence)

    def released(self, sequence: Sequence, is_sound: bool) -> None:
        """Prepare the release of a sequence's blocks.

        If it is sound, blocks computed since its last sample are registered. If not, none of its
        blocks can be found any more, shared ones included: one of them may be the cause.
        """
        if not is_sound:
            self._withdraw(sequence)
        elif sequence.cache.is_proven:
            self._register(sequence)
            self._register_rest(sequence)
        self._remove_leader(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        for table, blocks in enumerate(sequence.cache.tables):
            for block in blocks[self._first(sequence, table) :]:
                if block in self._index:
                    self._index.remove(block)
                    self._blocks.uncache(block)

    def _remove_leader(self, sequence: Sequence) -> None:
        if self._leaders.get(sequence.cache.lead_digest) is sequence:
            del self._leaders[sequence.cache.lead_digest]

    def _first(self, sequence: Sequence, table: int) -> int:
        """Return the first block of a table that the sequence still has."""
        return sequence.cache.num_outside if table in self._local else 0

    def _register(self, sequence: Sequence) -> None:
        """Make the whole blocks that a sequence has computed findable."""
        start, end = sequence.cache.num_registered, sequence.num_computed // self._size
        sequence.cache.register_at = (end + 1) * self._size
        if start == end:
            return
        for table, blocks in enumerate(sequence.cache.tables):
            self._put(sequence, table, blocks, range(max(start, self._first(sequence, table)), end))
        self._retain(sequence, start, end)
        sequence.cache.num_registered = end

    def _put(self, sequence: Sequence, table: int, table_blocks: list[int], numbers: range) -> None:
        """Put the blocks `numbers` of a table into the index."""
        if not numbers:
            return
        start, end, size = numbers.start, numbers.stop, self._size
        index, blocks, digests = self._index, self._blocks, self._chain(sequence).digests
        keys = digests[start : end + 1]
        if table:
            keys = [_key(digest, table) for digest in keys]
        packed = sequence.ids(start * size, end * size).tobytes()
        cached, adapter = [], _adapter_of(sequence)
        for block, parent, key, tokens in zip(
            table_blocks[start:end], keys, keys[1:], split(packed, size), strict=False
        ):
            other = index.find(key)
            if other is not None:
                if not blocks.is_idle(other):
                    continue  # another block with this content is in use
                index.remove(other)
                blocks.uncache(other)
            index.put(block, parent, key, tokens, adapter)
            cached.append(block)
        blocks.mark_cached(cached)
        self._tier.discard(keys[1:])
        if table == 0:
            index.add_segments(digests, numbers)

    def _register_rest(self, sequence: Sequence) -> None:
        """Make a partly filled block findable, unless another block starts with the same tokens."""
        number = sequence.cache.num_registered
        start, end = number * self._size, sequence.num_computed
        if start == end:
            return
        tokens = sequence.ids(start, end).tobytes()
        digest = self._chain(sequence).digests[number]
        for table, blocks in enumerate(sequence.cache.tables):
            parent = _key(digest, table)
            _, num_known = self._index.closest(parent, tokens)
            if num_known < end - start:
                self._index.put(blocks[number], parent, None, tokens)
                self._blocks.mark_cached([blocks[number]])
        self._retain(sequence, number, number + 1)

    def _retain(self, sequence: Sequence, start: int, end: int) -> None:
        """Set the priorities that the request asks for, for these blocks of all tables."""
        retention = sequence.request.message.retention
        if retention is None:
            return
        for table, blocks in enumerate(sequence.cache.tables):
            for i in range(max(start, self._first(sequence, table)), end):
                found = retention.of(i * self._size, sequence.num_prompt)
                if found is not None and blocks[i] in self._index:
                    priority, duration_ms = found
                    self._blocks.retain(blocks[i], priority, max(0, duration_ms) * 1_000_000)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that the index and the pool agree, and that every leader runs. O(blocks)."""
        self._index.check_integrity(self._blocks.cached)
        assert all(leader in running for leader in self._leaders.values())


def _key(digest: bytes, table: int) -> bytes:
    """Return a digest marked with its table."""
    return digest + bytes((table,)) if table else digest


def _adapter_of(sequence: Sequence) -> str | None:
    """Return the adapter's name as events have it, empty for none; None: salted, not published."""
    message, adapter = sequence.request.message, sequence.request.adapter
    if message.cache_salt:
        return None
    return message.adapter or ("" if adapter is None else adapter.digest.hex())
