"""What of a sequence its next tokens can still see, and what may be forgotten."""

from typing import NamedTuple


class Window(NamedTuple):
    """The first `num_sinks` tokens of a sequence, and with them `size` up to a token's own.

    `size` 0: everything, always. Blocks are counted in the sequence, from 0.
    """

    size: int = 0
    num_sinks: int = 0
    num_ahead: int = 1  # tokens that may be computed beyond those that are committed
    has_gaps: bool = False  # tables lack what is forgotten; else its entries are never read again

    def forgotten(self, num_tokens: int, block_size: int) -> range:
        """Blocks that no token sees any more once `num_tokens` are computed."""
        begin = -(-self.num_sinks // block_size)
        end = (num_tokens + 1 - (self.size - self.num_sinks)) // block_size if self.size else 0
        return range(begin, max(begin, end))

    def most_blocks(self, block_size: int, num_ahead: int | None = None) -> int | None:
        """Blocks that a sequence needs at most, whatever its length; None: no such bound."""
        if not self.size:
            return None
        num_ahead = self.num_ahead if num_ahead is None else num_ahead
        # The oldest token that is seen may be the last of its block.
        num_tokens = self.size - self.num_sinks - 1 + block_size - 1 + num_ahead
        return -(-self.num_sinks // block_size) + -(-num_tokens // block_size)
