"""What of a sequence is computed already, and in which blocks: the scheduler's only way to them.

A running sequence holds the blocks of its table (`Sequence.block_ids`), others hold none.

    match     which blocks hold the beginning of a sequence's tokens
    admit     a table with room for so many tokens: those blocks, and new ones
    grow      one more block
    forget    what none of its next tokens sees is not its any more
    computed  a step computed more of it, and what it sampled is a number: others may find it
    release   the table is gone; launched steps may still touch it, so it is fenced
    launch    a step begins, with the copies of blocks that must come before it
    complete  the oldest step has ended; `roll_back`: all launched ones are void

Whole blocks are shared; of the next one, what still matches is copied. Shared blocks are never
written: who shares them computes at later positions, in blocks of its own. A finite sample proves
that all keys and values before it are finite (a NaN in any of them would be in it), and only then
they can be found. An idle block is found until it is handed out to somebody.
What is not here may lie in host memory: see tier.py.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from sys import maxsize
from time import monotonic_ns

from slipstream_contract.retention import DEFAULT_RETENTION

from slipstream.engine.batch import Copy
from slipstream.engine.blocks import BlockManager
from slipstream.engine.host import Mover
from slipstream.engine.prefix import Chain, PrefixIndex, pack
from slipstream.engine.sequence import Sequence
from slipstream.engine.tier import Tier
from slipstream.engine.window import Window
from slipstream.figures import EVICTIONS

_NOT_HERE = -1  # but in host memory

Copies = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Match:
    """What the cache has of a sequence."""

    blocks: list[int]  # or `_NOT_HERE`
    num_forgotten: int = 0  # of them, in front: nobody sees them, any number stands for them
    source: int = -1  # a block that begins with the `num_copied` tokens after those
    num_copied: int = 0
    leader: Sequence | None = None  # is about to compute `num_coming` more tokens of it
    num_coming: int = 0


class KVCache:
    """The tables of all sequences, over one pool of blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        is_reused: bool = True,
        clock: Callable[[], int] = monotonic_ns,
        window: Window | None = None,
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
        self.window = window or Window()
        self.block_size = block_size
        self.num_evicted = dict.fromkeys(EVICTIONS, 0)  # blocks handed out that held something
        self._is_reused = is_reused and not self.window.has_gaps
        mover = mover if self._is_reused else None
        self._blocks = BlockManager(num_blocks, clock, self._evict, mover is not None)
        self._index = PrefixIndex(block_size)
        self._token_ns = token_ns
        self.tier = Tier(self._blocks, self._index, mover, self._compute_s, self._evict)
        self._leaders: dict[bytes, Sequence] = {}  # digest of the first block that it computes
        self._copies: list[Copy] = []  # that no step has done yet
        self._launched: deque[list[Copy]] = deque()  # by the steps in flight

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
        num_blocks = -(-num_tokens // self.block_size)
        return min(num_blocks, self.window.most_blocks(self.block_size, 1) or num_blocks)

    # --- tables --------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Match:
        """The longest beginning of its tokens, without the last one, that is computed."""
        match = Match([])
        if not self._finds(sequence):
            return match
        token_ids, size = sequence.token_ids, self.block_size
        digests = self._chain(sequence).digests
        most = (len(token_ids) - 1) // size
        if self.window.size:
            self._match_window(match, digests[1 : most + 1])
        else:
            for block in self._find(digests[1 : most + 1]):
                if block is None:
                    break
                match.blocks.append(block)
        number = len(match.blocks)
        rest = token_ids[number * size : min((number + 1) * size, len(token_ids) - 1)]
        match.source, match.num_copied = self._index.closest(digests[number], pack(rest))
        if self.tier.is_arriving(match.source):
            match.num_copied = 0  # it is not there yet
        if number < most and (leader := self._leaders.get(digests[number + 1])) is not None:
            match.leader = leader
            theirs = self._chain(leader).digests
            both = range(number, min(most, len(theirs) - 1) + 1)
            end = bisect_left(both, True, key=lambda i: digests[i] != theirs[i])
            match.num_coming = (end - 1) * size
        return match

    def _find(self, digests: list[bytes]) -> Iterator[int | None]:
        """The block of each, `_NOT_HERE`, or None if it is nowhere."""
        find, elsewhere = self._index.find, self.tier.fetchable()
        for digest in digests:
            block = find(digest)
            yield _NOT_HERE if block is None and digest in elsewhere else block

    def _finds(self, sequence: Sequence) -> bool:
        """Whether a sequence shares blocks at all.

        Of a window it gives back what it shared and needs others for it, which one that is spared
        could not count on.
        """
        return self._is_reused and not (self.window.size and sequence.is_spared)

    def _match_window(self, match: Match, digests: list[bytes]) -> None:
        """The longest beginning of which there is all that its next token sees."""
        found = list(self._find(digests))
        begin = 0  # of those that are there without a hole up to the number
        for number, block in enumerate(found, 1):
            begin = number if block is None else begin
            first = self._forgotten(number * self.block_size).stop
            if begin <= first < number:
                seen = [block for block in found[first:number] if block is not None]
                match.blocks, match.num_forgotten = [0] * first + seen, first

    def _forgotten(self, num_tokens: int) -> range:
        return self.window.forgotten(num_tokens, self.block_size)

    def admit(self, sequence: Sequence, match: Match, num_tokens: int, num_spare: int) -> bool:
        """Give a sequence room for so many tokens, or for as many as the cache has.

        False, and nothing has changed, if that does not leave `num_spare` blocks free; with host
        memory others may have begun to move there.
        """
        blocks, size = self._blocks, self.block_size
        match, shared, num_new = self._make_room(sequence, match, num_tokens, num_spare)
        num_fetched = match.blocks[match.num_forgotten :].count(_NOT_HERE)
        num_left = blocks.num_free - num_spare - num_new - blocks.num_shareable(shared)
        if num_left < 0:
            return False
        sequence.num_computed = len(match.blocks) * size
        blocks.share(shared)
        is_copied = match.num_copied and (num_left or not blocks.is_idle(match.source))
        if is_copied:
            blocks.share([match.source])  # or it might be handed out here
        own = blocks.allocate(num_new)
        if is_copied:
            sequence.copy = Copy(match.source, own[num_fetched])
            self._copies.append(sequence.copy)
            sequence.num_computed += match.num_copied
        sequence.num_scheduled = sequence.num_computed
        if num_fetched:
            self._fetch(sequence, match.blocks, own)
        sequence.block_ids = match.blocks + own[num_fetched:]
        sequence.num_forgotten = match.num_forgotten
        sequence.capacity = len(sequence.block_ids) * size
        sequence.num_shared_blocks += len(shared) + num_fetched
        sequence.num_allocated_blocks += num_new - num_fetched
        if self._finds(sequence):
            self._begin(sequence, len(match.blocks))
        self.tier.admitted(sequence, num_fetched * size)
        return True

    def _make_room(
        self, sequence: Sequence, match: Match, num_tokens: int, num_spare: int
    ) -> tuple[Match, list[int], int]:
        """The match, the blocks of it that are here, and how many new ones are needed.

        Where there are too few, others begin to leave for host memory, but none of these.
        """
        shared, num_new = self._needs(match, num_tokens)
        if self._blocks.has_host and num_new + num_spare > self.num_free:
            self._blocks.share(shared)
            self.tier.has_room(num_new + num_spare)
            self._blocks.free(reversed(shared))
            match = self.match(sequence)  # what was found there may have gone
            shared, num_new = self._needs(match, num_tokens)
        return match, shared, num_new

    def _needs(self, match: Match, num_tokens: int) -> tuple[list[int], int]:
        size, found = self.block_size, match.blocks[match.num_forgotten :]
        most = min(self.window.most_blocks(size) or self.num_blocks, self.num_blocks)
        num_more = min(-(-num_tokens // size) - len(match.blocks), most - len(found))
        shared = [block for block in found if block != _NOT_HERE]
        return shared, num_more + len(found) - len(shared)

    def _fetch(self, sequence: Sequence, found: list[int], own: list[int]) -> None:
        """What was found in host memory comes into the first of these blocks, in order."""
        chain, number = self._chain(sequence), 0
        for i, block in enumerate(found):
            if block == _NOT_HERE:
                tokens = chain.tokens(i, sequence.token_ids)
                self.tier.fetch(own[number], chain.digests[i], chain.digests[i + 1], tokens)
                found[i] = own[number]
                number += 1

    def _compute_s(self) -> float | None:
        """How long a block of a prompt takes, if that is known."""
        token_ns = self._token_ns()
        return None if token_ns is None else token_ns * self.block_size / 1e9

    def forget(self, sequence: Sequence) -> None:
        """Give back what none of its next tokens sees.

        What nobody else has, nor can find, it takes for the tokens to come, as far as it knows
        them; one that is spared takes all of it.
        """
        size, blocks = self.block_size, self._blocks
        gone = self._forgotten(sequence.num_computed)
        begin = max(gone.start, sequence.num_forgotten)
        end = gone.stop - sequence.gap // size
        if begin >= end:
            return
        old, table = sequence.block_ids[begin:end], sequence.block_ids
        num_tokens = min(sequence.num_tokens, sequence.num_computed + self.window.num_ahead)
        num_wanted = max(0, -(-(num_tokens - sequence.capacity) // size))
        own = [block for block in old if blocks.is_exclusive(block)]
        again = own if sequence.is_spared else own[:num_wanted]
        blocks.free(block for block in old if block not in again)
        if self.window.has_gaps:
            table = table[:begin] + table[end:]
            sequence.gap += (end - begin) * size
            sequence.is_new = True  # all of its table is
        else:
            sequence.num_forgotten = end
        sequence.block_ids = table + again
        sequence.capacity += len(again) * size

    def grow(self, sequence: Sequence) -> None:
        """One block more; there must be a free one."""
        sequence.block_ids += self._blocks.allocate(1)
        sequence.capacity += self.block_size
        sequence.num_allocated_blocks += 1

    def release(self, sequence: Sequence, is_sound: bool = True) -> None:
        """Take all blocks from a sequence; what it has computed counts no more.

        If not sound, nothing can be found that was not before.
        """
        if is_sound and sequence.is_proven:
            self._register(sequence)
            self._register_rest(sequence)
        self._forget_leader(sequence)
        self.tier.released(sequence.id)
        copy, sequence.copy = sequence.copy, None
        if copy is not None:
            copy.is_void = True
            if copy in self._copies:
                self._copies.remove(copy)
                self._blocks.free([copy.source])
        # The last ones first: they are handed out first, and are worth nothing without the others.
        self._blocks.free(reversed(sequence.block_ids[sequence.num_forgotten :]))
        sequence.block_ids = []  # a new list: rows in flight keep the old one
        sequence.num_forgotten = sequence.gap = 0
        sequence.capacity = sequence.num_computed = sequence.num_scheduled = 0
        sequence.is_proven = False
        sequence.next_note = maxsize

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

    def computed(self, sequence: Sequence) -> None:
        """Its first `num_computed` tokens are, and its sample is finite.

        Needed for the first sample since it was admitted, and once `num_computed` has come to
        `next_note`.
        """
        self._register(sequence)
        if not sequence.is_proven:
            sequence.is_proven = True
            self._register_rest(sequence)
            self._forget_leader(sequence)

    # --- what is found -------------------------------------------------------------------------

    def _chain(self, sequence: Sequence) -> Chain:
        """The digests of a sequence's whole blocks; those of a prompt are made once a request."""
        request, chain = sequence.request, sequence.chain
        if chain is None:
            if request.chain is None:
                request.chain = self._index.chain(request.cache_salt)
                request.chain.extend(sequence.token_ids[: sequence.num_prompt])
            is_alone = len(request.sequences) == 1
            chain = sequence.chain = request.chain if is_alone else request.chain.copy()
        chain.extend(sequence.token_ids)
        return chain

    def _begin(self, sequence: Sequence, num_found: int) -> None:
        """It holds these blocks of others, and will compute what follows."""
        self._retain(sequence, 0, num_found)
        sequence.num_registered = num_found
        sequence.next_note = 0
        digests = self._chain(sequence).digests
        if num_found + 1 < len(digests):
            sequence.leads = digests[num_found + 1]
            self._leaders.setdefault(sequence.leads, sequence)

    def _forget_leader(self, sequence: Sequence) -> None:
        if self._leaders.get(sequence.leads) is sequence:
            del self._leaders[sequence.leads]

    def _register(self, sequence: Sequence) -> None:
        """The whole blocks that it has computed can be found from now on."""
        begin = sequence.num_registered = max(sequence.num_registered, sequence.num_forgotten)
        end = sequence.num_computed // self.block_size
        sequence.next_note = (end + 1) * self.block_size
        if begin == end:
            return
        chain, index, blocks = self._chain(sequence), self._index, self._blocks
        digests, token_ids = chain.digests, sequence.token_ids
        for i in range(begin, end):
            block, other = sequence.block_ids[i], index.find(digests[i + 1])
            if other is not None:
                if not blocks.is_idle(other):
                    continue  # found there, while it is in use
                index.forget(other)
                blocks.drop(other)
            index.put(block, digests[i], digests[i + 1], chain.tokens(i, token_ids))
            blocks.keep(block)
            self.tier.forget(digests[i + 1])
        self._retain(sequence, begin, end)
        sequence.num_registered = end

    def _register_rest(self, sequence: Sequence) -> None:
        """So can what it has computed of one more block, unless others begin with all of it."""
        begin, end = sequence.num_registered * self.block_size, sequence.num_computed
        if begin == end:
            return
        tokens = pack(sequence.token_ids[begin:end])
        parent = self._chain(sequence).digests[sequence.num_registered]
        block, num_known = self._index.closest(parent, tokens)
        if num_known == end - begin:
            return
        block = sequence.block_ids[sequence.num_registered]
        self._index.put(block, parent, None, tokens)
        self._blocks.keep(block)
        self._retain(sequence, sequence.num_registered, sequence.num_registered + 1)

    def _retain(self, sequence: Sequence, begin: int, end: int) -> None:
        """What its request says of these blocks of its table."""
        retention = sequence.request.retention
        if retention is None:
            return
        for i in range(max(begin, sequence.num_forgotten), end):
            found = retention.of(i * self.block_size, sequence.num_prompt)
            block = sequence.block_ids[i]
            if found is not None and block in self._index:
                priority, duration_ms = found
                self._blocks.retain(block, priority, max(0, duration_ms) * 1_000_000)

    def _evict(self, block: int, priority: int) -> None:
        self._index.forget(block)
        above = (priority > DEFAULT_RETENTION) - (priority < DEFAULT_RETENTION)
        self.num_evicted[EVICTIONS[1 + above]] += 1

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Every block accounted for, no shared one written. O(blocks)."""
        running = list(running)
        sources = [copy.source for copies in (self._copies, *self._launched) for copy in copies]
        self._blocks.check_integrity([*(s.block_ids[s.num_forgotten :] for s in running), sources])
        self._index.check_integrity(self._blocks.kept)
        self.tier.check_integrity(self._blocks.moving)
        assert all(leader in running for leader in self._leaders.values())
        size = self.block_size
        owners: dict[int, int] = {}
        for sequence in running:
            assert sequence.num_scheduled <= sequence.capacity
            assert sequence.capacity == len(sequence.block_ids) * size + sequence.gap
            for block in sequence.block_ids[(sequence.num_computed - sequence.gap) // size :]:
                assert owners.setdefault(block, sequence.id) == sequence.id, "two writers"
        for sequence in running:
            place = (sequence.num_computed - sequence.gap) // size
            for block in sequence.block_ids[sequence.num_forgotten : place]:
                assert owners.get(block, sequence.id) == sequence.id, "a shared block is written"
