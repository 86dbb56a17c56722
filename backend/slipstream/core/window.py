"""What of a sequence its next tokens can still see, and what may be forgotten."""

from typing import NamedTuple


class Window(NamedTuple):
    """The first `num_sinks` tokens of a sequence, and with them `size` up to a token's own.

    `size` 0: everything, always. Blocks are counted in the sequence, from 0. A sequence has
    `num_tables` tables, as `groups.py` says; those of `full` see everything, whatever the window.
    """

    size: int = 0
    num_sinks: int = 0
    num_ahead: int = 1  # tokens that may be computed beyond those that are committed
    has_gaps: bool = False  # tables lack what is forgotten; else its entries are never read again
    num_tables: int = 1
    num_full: int = 0  # of them, the first; all where there is no window

    @property
    def full(self) -> range:
        """The tables that keep everything."""
        return range(self.num_full if self.size else self.num_tables)

    @property
    def local(self) -> range:
        """The tables that forget what is outside of the window."""
        return range(self.full.stop, self.num_tables)

    def forgotten(self, num_tokens: int, block_size: int) -> range:
        """Blocks that no token sees any more once `num_tokens` are computed, in local tables."""
        begin = -(-self.num_sinks // block_size)
        end = (num_tokens + 1 - (self.size - self.num_sinks)) // block_size if self.size else 0
        return range(begin, max(begin, end))

    def most_blocks(self, block_size: int, num_ahead: int | None = None) -> int | None:
        """Blocks that a sequence needs at most in a local table, whatever its length.

        None: no such bound.
        """
        if not self.size:
            return None
        num_ahead = self.num_ahead if num_ahead is None else num_ahead
        # The oldest token that is seen may be the last of its block.
        num_tokens = self.size - self.num_sinks - 1 + block_size - 1 + num_ahead
        return -(-self.num_sinks // block_size) + -(-num_tokens // block_size)

    def blocks_for(self, num_blocks: int, block_size: int, num_ahead: int | None = None) -> int:
        """Blocks of all tables that a sequence of `num_blocks` in each needs at most."""
        most = self.most_blocks(block_size, num_ahead) or num_blocks
        return len(self.full) * num_blocks + len(self.local) * min(num_blocks, most)
