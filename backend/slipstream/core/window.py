"""Compute which tokens of a sequence attention can still see, and which blocks it can drop."""

from typing import NamedTuple


class AttentionWindow(NamedTuple):
    """A sliding window with attention sinks.

    A token sees `size` tokens: the first `num_sinks` of the sequence, and the last ones up to
    itself. `size` 0 means full attention. Blocks are counted within the sequence, from 0. A
    sequence has `num_tables` tables (see `groups.py`); the tables in `full` keep every token,
    whatever the window.

    If it `is_chunked`, a token of local tables sees only those of its own attention chunk, which
    are the tokens whose position divided by `size` is the same: some of the last `size` ones. No
    row of a step crosses a border of chunks, so all its tokens see the same ones before it.
    """

    size: int = 0
    num_sinks: int = 0
    num_ahead: int = 1  # tokens that may be in flight beyond those committed
    has_gaps: bool = False  # entries outside are removed from tables; else never read again
    num_tables: int = 1
    num_full: int = 0  # the first of them; all if there is no window
    is_chunked: bool = False

    def up_to_border(self, start: int) -> int | None:
        """Return the most tokens of a row that begins at position `start`; None: any number."""
        return self.size - start % self.size if self.is_chunked else None

    @property
    def full(self) -> range:
        """The tables that keep every token."""
        return range(self.num_full if self.size else self.num_tables)

    @property
    def local(self) -> range:
        """The tables that drop what has left the window."""
        return range(self.full.stop, self.num_tables)

    def crosses(self, count: int, num_cached: int) -> bool:
        """Return whether the last `count` of so many tokens of a sequence lie in several chunks."""
        most = self.up_to_border(num_cached - count)
        return most is not None and count > most

    def outside(self, num_tokens: int, block_size: int) -> range:
        """Return the blocks of local tables that no token sees once `num_tokens` are computed."""
        start = -(-self.num_sinks // block_size)
        end = (num_tokens + 1 - (self.size - self.num_sinks)) // block_size if self.size else 0
        return range(start, max(start, end))

    def max_local_blocks(self, block_size: int, num_ahead: int | None = None) -> int | None:
        """Return the most blocks that a sequence needs in a local table; None without a window."""
        if not self.size:
            return None
        num_ahead = self.num_ahead if num_ahead is None else num_ahead
        # The oldest visible token may be the last of its block.
        num_tokens = self.size - self.num_sinks - 1 + block_size - 1 + num_ahead
        return -(-self.num_sinks // block_size) + -(-num_tokens // block_size)

    def blocks_for(self, num_blocks: int, block_size: int, num_ahead: int | None = None) -> int:
        """Return the most blocks of all tables that a sequence of `num_blocks` in each needs."""
        most = self.max_local_blocks(block_size, num_ahead) or num_blocks
        return len(self.full) * num_blocks + len(self.local) * min(num_blocks, most)
