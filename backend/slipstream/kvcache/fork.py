"""Give one sequence the tokens of another: whole blocks by reference, the last part by a copy.

    parent  [ 0 | 1 | 2 | 3 . ]        child keeps its own blocks from place 3 on, if it has any:
    child   [ 0 | 1 | 2 | c . ]        into the first of them, block c, a part of block 3 is copied

The copy runs before the rows of the next step, so both may then write their own next token. A block
that others find, or copy from, is never written: the child takes another in its place.
"""

from collections.abc import Sequence as Many
from operator import is_

from slipstream.core.batch import BlockCopy
from slipstream.core.prefix import PrefixIndex
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.kvcache.blocks import BlockManager


class Forks:
    """Forks of sequences over one pool of blocks."""

    def __init__(
        self, blocks: BlockManager, index: PrefixIndex, window: AttentionWindow, block_size: int
    ) -> None:
        self._blocks = blocks
        self._index = index
        self._window = window
        self._size = block_size
        self._num_full = len(window.full)

    def num_needed(self, parent: Sequence, child: Sequence) -> int:
        """Return how many free blocks a fork takes, whatever the child gives up."""
        place, is_partial = self._place(parent)
        if not is_partial:
            return 0
        tables = self._tables(child)
        return sum([len(own) <= place or not self._is_own(own[place]) for own in tables])

    def fork(self, parent: Sequence, child: Sequence) -> list[BlockCopy]:
        """Give `child` the computed tokens of `parent`, and return the copies that it needs.

        The parent's tokens and chain are as when they were computed. The child's blocks up to
        there are freed, but for those that both have; what it was is gone. Tables in which nothing
        changes are the lists that they were.
        """
        place, is_partial = self._place(parent)
        blocks, state = self._blocks, child.cache
        tables, copies = [], []
        for number, (old, own) in enumerate(
            zip(parent.cache.tables, self._tables(child), strict=True)
        ):
            has_changed = self._share(parent, child, number, place)
            tail = own[place:]
            if is_partial:
                target, tail = self._target(tail)
                blocks.share([old[place]])  # until the copy is complete
                copies.append(BlockCopy(old[place], target))
                state.num_allocated_blocks += len(own) <= place
                has_changed = has_changed or own[place : place + 1] != [target]
                tail = [target, *tail]
            tables.append(old[:place] + tail if has_changed else own)
        self._follow(parent, child, tuple(tables), copies)
        return copies

    @staticmethod
    def follow_tokens(parent: Sequence, child: Sequence) -> None:
        """Make the chain of the child's tokens that of its parent's, which it takes over."""
        mine, theirs = child.cache.chain, parent.cache.chain
        if theirs is None or mine is None or not mine.starts(theirs):
            child.cache.chain = None if theirs is None else theirs.copy()

    def _share(self, parent: Sequence, child: Sequence, number: int, place: int) -> bool:
        """Give a child's table the first `place` blocks of its parent's; return if any differ."""
        state, old = child.cache, parent.cache.tables[number]
        own = self._tables(child)[number]
        is_full = number < self._num_full
        first = 0 if is_full else parent.cache.num_outside
        own_first = 0 if is_full else state.num_outside
        if first == own_first:
            if len(own) >= place and old[first:place] == own[first:place]:
                return False
            first = own_first = _first_difference(old, own, first, min(place, len(own)))
        new = old[first:place]
        self._blocks.share(new)
        self._blocks.free(reversed(own[own_first:place]))
        state.num_shared_blocks += len(new)
        return True

    def _follow(
        self,
        parent: Sequence,
        child: Sequence,
        tables: tuple[list[int], ...],
        copies: list[BlockCopy],
    ) -> None:
        """Make all that is known of the child's blocks that of the parent's."""
        state, theirs = child.cache, parent.cache
        is_same = len(state.tables) == len(tables) and all(map(is_, state.tables, tables))
        state.num_outside, state.gap = theirs.num_outside, theirs.gap
        state.is_proven, state.register_at = theirs.is_proven, theirs.register_at
        state.num_registered = theirs.num_registered
        state.tables, state.copies = tables, copies
        state.capacity = min(map(len, tables)) * self._size + state.gap
        self.follow_tokens(parent, child)
        state.lead_digest = b""
        child.num_computed = child.num_scheduled = parent.num_computed
        if not is_same:
            child.is_new = True  # the runner needs the whole tables

    def _place(self, parent: Sequence) -> tuple[int, bool]:
        """Return the place of the parent's next token in its tables, and if that block has some."""
        size, place = self._size, parent.num_computed - parent.cache.gap
        return place // size, place % size > 0

    def _tables(self, child: Sequence) -> Many[list[int]]:
        return child.cache.tables or [[] for _ in range(self._window.num_tables)]

    def _is_own(self, block: int) -> bool:
        """Return whether nobody else has a block, or is copying from it."""
        return self._blocks.num_references(block) == 1

    def _target(self, tail: list[int]) -> tuple[int, list[int]]:
        """Return a block that may be overwritten, and the child's blocks behind it."""
        if not tail:
            return self._blocks.allocate(1)[0], []
        block, rest = tail[0], tail[1:]
        if not self._is_own(block):
            [other] = self._blocks.allocate(1)
            self._blocks.free([block])
            return other, rest
        if block in self._index:
            self._index.remove(block)
            self._blocks.uncache(block)
        return block, rest


def _first_difference(one: list[int], other: list[int], start: int, end: int) -> int:
    """Return the first place from `start` on where two lists differ; `end` if they do not.

    By halves, each compared at once: a table may have thousands of blocks.
    """
    if one[start:end] == other[start:end]:
        return end
    while end - start > 1:
        middle = (start + end) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle
    return start
