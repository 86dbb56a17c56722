"""What the cache knows again: which blocks hold the beginning of a sequence's tokens.

Of each table (see groups.py) another block: its key is the digest of the tokens up to the block's
end, marked with the table. What is found is what all tables have: those that see everything from
the first block on, local ones what their window shows of the tokens found.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from slipstream.core.prefix import DigestChain, PrefixIndex, split
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.kvcache.blocks import BlockManager
from slipstream.kvcache.tier import Tier

NOT_HERE = -1  # a block that is in host memory


@dataclass(slots=True)
class Match:
    """What the cache has of a sequence."""

    num_blocks: int = 0  # of each table
    tables: list[list[int]] = field(default_factory=list)  # blocks, or `NOT_HERE`
    num_outside: int = 0  # in front of local tables: nobody sees them, any number stands for them
    sources: list[int] = field(default_factory=list)  # of each table, a block that begins with
    num_copied: int = 0  # these tokens after those
    leader: Sequence | None = None  # is about to compute `num_coming` more tokens of it
    num_coming: int = 0


class Reuse:
    """The keys of blocks, and the sequences that compute what others wait for."""

    def __init__(
        self,
        blocks: BlockManager,
        index: PrefixIndex,
        tier: Tier,
        window: AttentionWindow,
        block_size: int,
        is_on: bool,
    ) -> None:
        """If not `is_on`, nothing is found."""
        self._blocks = blocks
        self._index = index
        self._tier = tier
        self._window = window
        self._size = block_size
        self._full, self._local = window.full, window.local
        self._is_on = is_on
        self._leaders: dict[bytes, Sequence] = {}  # digest of the first block that it computes

    def finds(self, sequence: Sequence) -> bool:
        """Whether a sequence shares blocks at all.

        Of a window it gives back what it shared and needs others for it, which one that is spared
        could not count on.
        """
        return self._is_on and not (self._window.size and sequence.is_spared)

    # --- match ---------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Match:
        """The longest beginning of its tokens, without the last one, that is computed."""
        window, size, last = self._window, self._size, sequence.num_known - 1
        match = Match(tables=[[] for _ in range(window.num_tables)])
        if not self.finds(sequence):
            return match
        digests, most = self._chain(sequence).digests, last // size
        number = most
        for table in self._full:
            match.tables[table] = self._find(digests[1 : number + 1], table)
            number = len(match.tables[table])
        if window.size:
            number = self._shown(digests, number)
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
            match.num_coming = (end - 1) * size
        return match

    def _find(self, digests: list[bytes], table: int) -> list[int]:
        """The blocks of the first of them, up to one that is nowhere; of others `NOT_HERE`."""
        keys = digests if table == 0 else (_key(digest, table) for digest in digests)
        return list(iter(map(self._finder(), keys).__next__, None))

    def _finder(self) -> Callable[[bytes], int | None]:
        """It tells the block of a key, `NOT_HERE`, or None if that is nowhere."""
        find, elsewhere = self._index.find, self._tier.fetchable()

        def find_both(key: bytes) -> int | None:
            block = find(key)
            return NOT_HERE if block is None and key in elsewhere else block

        return find_both if elsewhere else find

    def _shown(self, digests: list[bytes], number: int) -> int:
        """The most blocks, up to so many, of which there is all that their next token sees.

        Only local tables are looked at. O(blocks) for each, that is, of a window if all are there.
        """
        find, size = self._finder(), self._size
        while number:
            first = self._window.outside(number * size, size).stop
            if first == number:
                return 0  # nothing of it is seen
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

    def _match_rest(self, match: Match, digest: bytes, rest: bytes) -> None:
        """What all tables have of the next block."""
        tables = range(self._window.num_tables)
        found = [self._index.closest(_key(digest, table), rest) for table in tables]
        match.sources = [source for source, _ in found]
        match.num_copied = min(count for _, count in found)
        if any(map(self._tier.is_arriving, match.sources)):
            match.num_copied = 0  # it is not there yet

    # --- what is known -------------------------------------------------------------------------

    def _chain(self, sequence: Sequence) -> DigestChain:
        """The digests of a sequence's whole blocks; those of a prompt are made once a request."""
        request, chain = sequence.request, sequence.chain
        if chain is None:
            if request.chain is None:
                request.chain = self._index.chain(request.cache_salt)
                self._extend(request.chain, sequence, sequence.num_prompt)
            is_alone = len(request.sequences) == 1
            chain = sequence.chain = request.chain if is_alone else request.chain.copy()
        self._extend(chain, sequence, sequence.num_known)
        return chain

    def _extend(self, chain: DigestChain, sequence: Sequence, num_tokens: int) -> None:
        """By its whole blocks up to so many tokens."""
        begin, end = chain.num_blocks * self._size, num_tokens // self._size * self._size
        if begin < end:
            chain.extend(sequence.ids(begin, end).tobytes())

    def fetch(self, sequence: Sequence, table: int, found: list[int], own: Iterator[int]) -> None:
        """What of a table was found in host memory comes into the next of `own`."""
        digests, size = self._chain(sequence).digests, self._size
        for i, block in enumerate(found):
            if block == NOT_HERE:
                found[i] = next(own)
                parent, key = (_key(digest, table) for digest in digests[i : i + 2])
                tokens = sequence.ids(i * size, (i + 1) * size).tobytes()
                self._tier.fetch(found[i], parent, key, tokens)
        if table == 0:
            self._index.add_segments(digests, range(len(found)))

    def begin(self, sequence: Sequence, num_found: int) -> None:
        """It holds so many blocks of others in each table, and will compute what follows."""
        if not self.finds(sequence):
            return
        self._retain(sequence, 0, num_found)
        sequence.num_registered = num_found
        sequence.register_at = 0
        digests = self._chain(sequence).digests
        if num_found + 1 < len(digests):
            sequence.lead_digest = digests[num_found + 1]
            self._leaders.setdefault(sequence.lead_digest, sequence)

    def computed(self, sequence: Sequence) -> None:
        """See `KVCache.computed`."""
        self._register(sequence)
        if not sequence.is_proven:
            sequence.is_proven = True
            self._register_rest(sequence)
            self._forget_leader(sequence)

    def end(self, sequence: Sequence, is_sound: bool) -> None:
        """It lets go of its blocks: if sound, what it has computed since it sampled is found, if
        not, nothing that it had, whoever computed it: that may be what was wrong.
        """
        if not is_sound:
            self._withdraw(sequence)
        elif sequence.is_proven:
            self._register(sequence)
            self._register_rest(sequence)
        self._forget_leader(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        for table, blocks in enumerate(sequence.tables):
            for block in blocks[self._first(sequence, table) :]:
                if block in self._index:
                    self._index.remove(block)
                    self._blocks.drop(block)

    def _forget_leader(self, sequence: Sequence) -> None:
        if self._leaders.get(sequence.lead_digest) is sequence:
            del self._leaders[sequence.lead_digest]

    def _first(self, sequence: Sequence, table: int) -> int:
        """The first block of a table that it still holds."""
        return sequence.num_outside if table in self._local else 0

    def _register(self, sequence: Sequence) -> None:
        """The whole blocks that it has computed can be found from now on."""
        begin, end = sequence.num_registered, sequence.num_computed // self._size
        sequence.register_at = (end + 1) * self._size
        if begin == end:
            return
        for table, blocks in enumerate(sequence.tables):
            self._put(sequence, table, blocks, range(max(begin, self._first(sequence, table)), end))
        self._retain(sequence, begin, end)
        sequence.num_registered = end

    def _put(self, sequence: Sequence, table: int, held: list[int], numbers: range) -> None:
        """These blocks of a table."""
        if not numbers:
            return
        begin, end, size = numbers.start, numbers.stop, self._size
        index, blocks, digests = self._index, self._blocks, self._chain(sequence).digests
        keys = digests[begin : end + 1]
        if table:
            keys = [_key(digest, table) for digest in keys]
        packed = sequence.ids(begin * size, end * size).tobytes()
        kept = []
        for block, parent, key, tokens in zip(
            held[begin:end], keys, keys[1:], split(packed, size), strict=False
        ):
            other = index.find(key)
            if other is not None:
                if not blocks.is_idle(other):
                    continue  # found there, while it is in use
                index.remove(other)
                blocks.drop(other)
            index.put(block, parent, key, tokens)
            kept.append(block)
        blocks.keep(kept)
        self._tier.forget(keys[1:])
        if table == 0:
            index.add_segments(digests, numbers)

    def _register_rest(self, sequence: Sequence) -> None:
        """So can what it has computed of one more block, unless others begin with all of it."""
        number = sequence.num_registered
        begin, end = number * self._size, sequence.num_computed
        if begin == end:
            return
        tokens = sequence.ids(begin, end).tobytes()
        digest = self._chain(sequence).digests[number]
        for table, blocks in enumerate(sequence.tables):
            parent = _key(digest, table)
            _, num_known = self._index.closest(parent, tokens)
            if num_known < end - begin:
                self._index.put(blocks[number], parent, None, tokens)
                self._blocks.keep([blocks[number]])
        self._retain(sequence, number, number + 1)

    def _retain(self, sequence: Sequence, begin: int, end: int) -> None:
        """What its request says of these blocks of its tables."""
        retention = sequence.request.retention
        if retention is None:
            return
        for table, blocks in enumerate(sequence.tables):
            for i in range(max(begin, self._first(sequence, table)), end):
                found = retention.of(i * self._size, sequence.num_prompt)
                if found is not None and blocks[i] in self._index:
                    priority, duration_ms = found
                    self._blocks.retain(blocks[i], priority, max(0, duration_ms) * 1_000_000)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """All parts agree. O(blocks)."""
        self._index.check_integrity(self._blocks.kept)
        assert all(leader in running for leader in self._leaders.values())


def _key(digest: bytes, table: int) -> bytes:
    """A digest, marked with its table."""
    return digest + bytes((table,)) if table else digest
