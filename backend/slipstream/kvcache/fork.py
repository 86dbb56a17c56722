"""Give one sequence the tokens of another: whole blocks by reference, the last part by a copy.

    parent  [ 0 | 1 | 2 | 3 . ]        child keeps its own blocks from place 3 on, if it has any:
    child   [ 0 | 1 | 2 | c . ]        into the first of them, block c, a part of block 3 is copied

The copy runs before the rows of the next step, so both may then write their own next token. A block
that others find, or copy from, is never written: the child takes another in its place.
"""

from collections.abc import Sequence as Many

from slipstream.core.batch import BlockCopy
from slipstream.core.prefix import PrefixIndex
from slipstream.core.sequence import Sequence
from slipstream.core.window import AttentionWindow
from slipstream.kvcache.blocks import BlockManager

_KEPT = ("capacity", "num_outside", "gap", "is_proven", "register_at", "num_registered")


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
        return sum(len(own) <= place or not self._is_own(own[place]) for own in tables)

    def fork(self, parent: Sequence, child: Sequence) -> list[BlockCopy]:
        """Give `child` the computed tokens of `parent`, and return the copies that it needs.

        The parent's tokens and chain are as when they were computed. The child's blocks up to
        there are freed; what it was is gone.
        """
        place, is_partial = self._place(parent)
        blocks, theirs = self._blocks, parent.cache
        tables, copies = [], []
        for number, (old, own) in enumerate(zip(theirs.tables, self._tables(child), strict=True)):
            is_full = number < self._num_full
            first = 0 if is_full else theirs.num_outside
            blocks.share(old[first:place])
            blocks.free(reversed(own[0 if is_full else child.cache.num_outside : place]))
            tail = own[place:]
            if is_partial:
                target, tail = self._target(tail)
                blocks.share([old[place]])  # until the copy is complete
                copies.append(BlockCopy(old[place], target))
                child.cache.num_allocated_blocks += not own[place:]
                tail = [target, *tail]
            tables.append(old[:place] + tail)
            child.cache.num_shared_blocks += len(old[first:place])
        self._follow(parent, child, tuple(tables), copies)
        return copies

    def _follow(
        self,
        parent: Sequence,
        child: Sequence,
        tables: tuple[list[int], ...],
        copies: list[BlockCopy],
    ) -> None:
        """Make all that is known of the child's blocks that of the parent's."""
        state, chain = child.cache, parent.cache.chain
        for name in _KEPT:
            setattr(state, name, getattr(parent.cache, name))
        state.tables, state.copies = tables, copies
        state.capacity = min(map(len, tables)) * self._size + state.gap
        state.chain = None if chain is None else chain.copy()
        state.lead_digest = b""
        child.num_computed = child.num_scheduled = parent.num_computed
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
