"""Attention chunks (Llama 4): a token sees those tokens before it whose chunk is its own.

A step's row lies within one chunk. So what its tokens see is a sequence by itself, which begins
with the chunk: a view of the row's table from the chunk's first block on, and a length that counts
from there. Layers attend to it as to everything; where keys and values go, and the positions by
which they turn, are those of the whole sequence.

The view is made on the device of what the step brings, so that a CUDA graph makes it, too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.layers.attention import StepRows


class ChunkView(NamedTuple):
    """What rows see of their tables, the same in each table of a row.

    `s` rows. Entries of `blocks` behind a row's length lie somewhere in its table.
    """

    lengths: Tensor  # [s] i32: cached tokens of the chunk that a row is in; 0: no row
    blocks: Tensor  # [s, blocks of a chunk] i64: places in the table
    contexts: tuple[tuple[int, int], ...]  # `StepRows.contexts`, of these lengths

    @classmethod
    def of(cls, rows: StepRows, chunk: int, block_size: int) -> "ChunkView":
        """Make the view of rows that lie within chunks of `chunk` tokens, which are whole blocks.

        A row that only fills a shape may be as long as it likes.
        """
        assert chunk % block_size == 0, "the backend refuses others"
        numbers = (rows.lengths - 1).clamp(min=0) // chunk
        size, width = chunk // block_size, rows.block_tables.shape[1]
        every = torch.arange(min(size, width), device=numbers.device)
        blocks = (numbers.long()[:, None] * size + every).clamp(max=width - 1)
        seen = [(count, (cached - 1) % chunk + 1) for count, cached in rows.contexts]
        contexts = tuple([(min(each), each[1]) for each in seen])
        return cls(rows.lengths - numbers * chunk, blocks, contexts)

    def __call__(self, rows: StepRows) -> StepRows:
        """Return rows, with a table of theirs, as layers of this table see them."""
        tables = rows.block_tables.gather(1, self.blocks)
        return rows._replace(block_tables=tables, lengths=self.lengths, contexts=self.contexts)
