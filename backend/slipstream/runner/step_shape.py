"""Sizes of a step's tensors: the shape of a batch, and the layouts that it may have."""

from typing import NamedTuple

from slipstream.core.batch import Batch
from slipstream.core.window import AttentionWindow


class StepShape(NamedTuple):
    """The sizes of a step's tensors: `num_decodes` of the rows come first and have one token.

    If it `has_drafts`, several of them may be of one sequence, so that a row attends to what others
    of the step write; the decode kernels of other steps read before that is there.
    """

    num_tokens: int
    num_rows: int
    num_decodes: int
    num_samples: int
    max_queries: int  # of the rows after the decodes; 0 without such rows
    has_drafts: bool = False
    contexts: tuple[tuple[int, int], ...] = ()  # queries, cached tokens of chunks; (): not known


class Layout(NamedTuple):
    """Form of a step's rows; not the default where tokens may not depend on neighbours."""

    multiple: int = 1  # tokens and samples are filled up to a multiple of it
    has_decodes: bool = True  # False: a decode is a chunk of one token
    has_chunks: bool = True  # False: a chunk is as many rows of one token
    window: AttentionWindow = AttentionWindow()  # whose borders no chunk crosses

    def up(self, count: int) -> int:
        """Round up to the multiple."""
        return -(-count // self.multiple) * self.multiple

    def shape_of(self, batch: Batch) -> StepShape:
        """Return the least shape of a batch."""
        rows = batch.rows
        num_decodes = batch.num_decodes if self.has_decodes else 0
        has_drafts = batch.num_drafts > 0 and num_decodes > 0
        if num_decodes == len(rows):
            count = self.up(num_decodes)
            return StepShape(count, num_decodes, num_decodes, count, 0, has_drafts)
        counts = [len(row.token_ids) for row in rows]
        num_tokens = sum(counts)
        num_samples = self.up(sum([row.samples for row in rows]))
        if not self.has_chunks:
            sizes = (self.up(num_tokens), num_tokens, num_decodes, num_samples, 1)
            return StepShape(*sizes, has_drafts)
        chunks = zip(rows[num_decodes:], counts[num_decodes:], strict=True)
        contexts = tuple([(count, row.start + count - row.gap) for row, count in chunks])
        assert not any(self.window.crosses(*each) for each in contexts), "the scheduler cuts there"
        longest = max(counts[num_decodes:])
        sizes = (self.up(num_tokens), len(rows), num_decodes, num_samples, longest)
        return StepShape(*sizes, has_drafts, contexts)


def gap_of(batch: Batch, shape: StepShape) -> tuple[int, int]:
    """Return the padding between decodes and chunks: the row, and how many rows of a token each.

    There are none where the decodes are chunks, or the shape has nothing but decodes.
    """
    if shape.num_rows == shape.num_decodes:
        return len(batch.rows), 0
    begin = min(batch.num_decodes, shape.num_decodes)
    return begin, shape.num_decodes - begin
