"""A batch as numpy arrays: what a step copies to the device.

What a sequence keeps while it runs (`Slots`) is written down once, and then what changed of it; so
a step of decodes costs a few microseconds of numpy and next to nothing a row.
"""

from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.batch import Batch, Row
from slipstream.kernels.sample import ROW
from slipstream.sampling.rows import HistoryArrays, history_arrays, pack_row, sampling_arrays

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
_Int = TypeVar("_Int", np.int32, np.int64)


class Shape(NamedTuple):
    """The sizes of a step's tensors: `num_decodes` of the rows come first and have one token."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    num_samples: int
    max_queries: int  # of the rows after the decodes; 0 without such rows


class StepArrays(NamedTuple):
    """A step of a `Shape`: `n` tokens of `s` rows, `r` of which are sampled.

    What is there only to fill a shape reads no cache, writes none, and draws nothing.
    """

    header: Int32s  # [3]: see `kernels.stage.begin_step`
    token_ids: Int64s  # [n]
    sources: Int32s  # [n]; >= 0: the token is this one of the results
    sample_rows: Int64s  # [r], of the n tokens
    positions: Int64s  # [n]
    slots: Int64s  # [t * n], of each of t tables where in the cache K and V go; -1: nowhere
    query_starts: Int32s  # [s - decodes + 1]
    lengths: Int32s  # [s]; 0: no row
    rows: Int32s  # [r, 16], of `SamplingInputs`
    edits: Int32s  # [e, 2], of `SamplingInputs`
    tables: Int32s  # [rows of the batch * t, longest table], a row's t tables together


class Layout(NamedTuple):
    """How a step presents its rows; not by default where tokens may not depend on neighbours."""

    multiple: int = 1  # tokens and samples are filled up to a multiple of it
    has_decodes: bool = True  # False: a decode is a chunk of one token
    has_chunks: bool = True  # False: a chunk is as many rows of one token

    def up(self, count: int) -> int:
        """To the multiple."""
        return -(-count // self.multiple) * self.multiple

    def shape_of(self, batch: Batch) -> Shape:
        """The least shape of a batch."""
        rows = batch.rows
        num_decodes = batch.num_decodes if self.has_decodes else 0
        if num_decodes == len(rows):
            count = self.up(num_decodes)
            return Shape(count, num_decodes, num_decodes, count, 0)
        counts = [len(row.token_ids) for row in rows]
        num_tokens = sum(counts)
        num_samples = self.up(sum([row.samples for row in rows]))
        if not self.has_chunks:
            return Shape(self.up(num_tokens), num_tokens, num_decodes, num_samples, 1)
        longest = max(counts[num_decodes:])
        return Shape(self.up(num_tokens), len(rows), num_decodes, num_samples, longest)


class Slots:
    """Block tables and sampling parameters of the sequences that run, by their slots.

    Of a slot's `num_tables` tables, number t is row `slot * num_tables + t` of `tables`.
    """

    def __init__(self, num_slots: int, max_blocks: int, num_tables: int = 1) -> None:
        self.num_tables = num_tables
        self.tables = np.zeros((num_slots * num_tables, max_blocks), np.int32)
        self._num_blocks = np.zeros(num_slots * num_tables, np.int64)
        self._packed = [b""] * num_slots  # `pack_row` of each

    def update(self, rows: tuple[Row, ...]) -> Int64s:
        """Take in what is new of these rows' sequences; their slots."""
        slots = np.array([row.slot for row in rows], np.int64)
        if self.num_tables == 1:
            sizes = [len(row.tables[0]) for row in rows]
        else:
            sizes = [len(table) for row in rows for table in row.tables]
        for row in rows:
            if row.is_new:
                begin = row.slot * self.num_tables
                self._num_blocks[begin : begin + self.num_tables] = 0
                self._packed[row.slot] = pack_row(row.sampling, row.seed, row.slot)
        self.grow(rows, self.of(slots), np.array(sizes, np.int64))
        return slots

    def of(self, slots: Int64s) -> Int64s:
        """Which of `tables` are theirs."""
        if self.num_tables == 1:
            return slots
        return (slots[:, None] * self.num_tables + np.arange(self.num_tables)).ravel()

    def grow(self, rows: tuple[Row, ...], tables: Int64s, num_blocks: Int64s) -> None:
        """Take in the blocks of the rows' tables that have had fewer than `num_blocks`."""
        grown = (self._num_blocks[tables] < num_blocks).nonzero()[0]
        for i, place in zip(grown.tolist(), tables[grown].tolist(), strict=True):
            number, table = divmod(i, self.num_tables)
            blocks, begin = rows[number].tables[table], int(self._num_blocks[place])
            end = self._num_blocks[place] = len(blocks)
            self.tables[place, begin:end] = blocks[begin:]

    def packed(self, rows: list[Row]) -> list[bytes]:
        """How each is drawn, but for what changes with every step."""
        packed = self._packed
        return [packed[row.slot] for row in rows]


def histories(rows: tuple[Row, ...]) -> HistoryArrays | None:
    """Of the rows whose tokens are to be counted anew."""
    found = [(r.slot, r.history, r.num_prompt) for r in rows if r.history is not None]
    return history_arrays(found) if found else None


def _filled(array: NDArray[_Int], size: int, fill: int) -> NDArray[_Int]:
    """`array`, made as long as `size`."""
    if len(array) == size:
        return array
    out = np.full(size, fill, array.dtype)
    out[: len(array)] = array
    return out


class _Gap(NamedTuple):
    """What fills a shape between decodes and chunks: `size` rows, of a token each, at `begin`."""

    begin: int
    size: int

    @classmethod
    def of(cls, batch: Batch, shape: Shape) -> "_Gap":
        """None, of size 0, where the decodes are chunks, or the shape has nothing but decodes."""
        if shape.num_rows == shape.num_decodes:
            return cls(len(batch.rows), 0)
        begin = min(batch.num_decodes, shape.num_decodes)
        return cls(begin, shape.num_decodes - begin)

    def open(self, array: NDArray[_Int], fill: int) -> NDArray[_Int]:
        """`array`, with the gap in it."""
        if self.size == 0:
            return array
        parts = (array[: self.begin], np.full(self.size, fill, array.dtype), array[self.begin :])
        return np.concatenate(parts)


def _query_starts(row_ends: Int64s, num_decodes: int, num_chunks: int) -> Int32s:
    """Of so many chunks, those that there are and then empty ones, from their first token on."""
    starts = np.zeros(num_chunks + 1, np.int32)
    ends = row_ends[num_decodes:] - num_decodes
    starts[1 : 1 + len(ends)] = ends
    starts[1 + len(ends) :] = starts[len(ends)]
    return starts


class _Built(NamedTuple):
    """A step of decodes alone, and where its rows have what."""

    shape: Shape
    tables: Int64s  # of `Slots`
    every: Int64s  # numbers from 0, one for each of these
    owners: Int64s | slice  # the row of each
    places: Int64s | slice  # of each in the step's `slots`
    arrays: StepArrays

    @classmethod
    def of(cls, shape: Shape, tables: Int64s, num_tables: int, arrays: StepArrays) -> "_Built":
        """Whose rows have these tables."""
        every = np.arange(len(tables))
        if num_tables == 1:
            return cls(shape, tables, every, slice(None), slice(len(tables)), arrays)
        owners, number = np.divmod(every, num_tables)
        return cls(shape, tables, every, owners, number * shape.num_tokens + owners, arrays)


class StepBuilder:
    """Makes the arrays of steps.

    Args:
        slots: what is known of the sequences.
        block_size: tokens of a block.
        layout: of the shapes.
        has_gaps: whether tables may lack what their sequences have forgotten.
    """

    def __init__(
        self, slots: Slots, block_size: int, layout: Layout | None = None, has_gaps: bool = False
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._has_gaps = has_gaps
        self.layout = layout or Layout()
        self._last: _Built | None = None

    def build(self, batch: Batch, shape: Shape, first_result: int, first_source: int) -> StepArrays:
        """The batch in a shape that is at least as large as its own.

        Args:
            batch: the step; without rows, all of it is there to fill the shape.
            shape: of the arrays.
            first_result: where in the results this step's samples begin.
            first_source: where those of the step before began.
        """
        last, self._last = self._last, None
        if last is not None and self._is_next(last, batch, shape):
            self._last = self._next(last, batch.rows, first_result, first_source)
            return self._last.arrays
        row_slots, arrays = self._build(batch, shape, first_result, first_source)
        if batch.num_decodes == len(batch.rows):
            tables = self._slots.of(row_slots)
            self._last = _Built.of(shape, tables, self._slots.num_tables, arrays)
        return arrays

    def _is_next(self, last: _Built, batch: Batch, shape: Shape) -> bool:
        """Is a step the last one, but for numbers that grow?"""
        has_edits = len(last.arrays.edits) > 0 or any(row.edits for row in batch.rows)
        is_next = batch.continues and not self._has_gaps
        return is_next and last.shape == shape and not has_edits

    def _next(
        self, last: _Built, rows: tuple[Row, ...], first_result: int, first_source: int
    ) -> _Built:
        """Every sequence one token further, which is the sample that it was in the last step."""
        count, size = len(rows), self._block_size
        positions, lengths = last.arrays.positions.copy(), last.arrays.lengths.copy()
        positions[:count] += 1
        lengths[:count] += 1
        last_blocks, within = np.divmod(positions[last.owners][: len(last.tables)], size)
        self._slots.grow(rows, last.tables, last_blocks + 1)
        width = last_blocks.max() + 1
        tables = np.take(self._slots.tables[:, :width], last.tables, axis=0)
        slots, sources = last.arrays.slots.copy(), last.arrays.sources.copy()
        slots[last.places] = tables[last.every, last_blocks].astype(np.int64) * size + within
        sources[:count] = np.arange(first_source, first_source + count)
        drawn = last.arrays.rows.copy()
        records = drawn.view(ROW)[:count, 0]
        records["number"] += 1
        records["result"] = np.arange(first_result, first_result + count)
        arrays = last.arrays._replace(
            positions=positions,
            lengths=lengths,
            slots=slots,
            sources=sources,
            rows=drawn,
            tables=tables,
        )
        return last._replace(arrays=arrays)

    def _build(
        self, batch: Batch, shape: Shape, first_result: int, first_source: int
    ) -> tuple[Int64s, StepArrays]:
        """The slots of the rows, and `build`."""
        rows, size = batch.rows, self._block_size
        slots = self._slots.update(rows)
        starts = np.array([row.start for row in rows], np.int64)
        if batch.num_decodes == len(rows):
            token_ids = np.array([row.token_ids[0] for row in rows], np.int64)
            counts = np.ones(len(rows), np.int64)
            owners = np.arange(len(rows))
        else:
            counts = np.array([len(row.token_ids) for row in rows], np.int64)
            token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64)
            owners = np.repeat(np.arange(len(rows)), counts)
        ends = counts.cumsum()
        positions = np.arange(len(owners)) - (ends - counts - starts)[owners]
        places, lengths = positions, starts + counts  # in the tables
        if self._has_gaps:
            gaps = np.array([row.gap for row in rows], np.int64)
            places, lengths = positions - gaps[owners], lengths - gaps
        table_slots, row_ends = slots, ends
        if not self.layout.has_chunks:
            lengths, table_slots = places + 1, slots[owners]
            row_ends = np.arange(1, len(owners) + 1)
        width = -(-int(lengths.max()) // size) if len(rows) else 0
        sources = np.array([row.source for row in rows], np.int32)
        sources[sources >= 0] += first_source
        samples = np.array([row.samples for row in rows], bool)
        sampling = [row for row in rows if row.samples]
        drawn = sampling_arrays(
            self._slots.packed(sampling),
            [row.num_outputs for row in sampling],
            [row.edits for row in sampling],
            shape.num_samples,
            first_result,
        )
        gap, n = _Gap.of(batch, shape), shape.num_tokens
        sampled = ends - 1
        sampled[gap.begin :] += gap.size
        return slots, StepArrays(
            np.zeros(3, np.int32),
            _filled(gap.open(token_ids, 0), n, 0),
            _filled(gap.open(sources[owners], -1), n, -1),
            _filled(sampled[samples], shape.num_samples, 0),
            _filled(gap.open(positions, 0), n, 0),
            self._places(slots[owners], places, gap, n),
            _query_starts(row_ends, gap.begin, shape.num_rows - shape.num_decodes),
            _filled(gap.open(lengths, 0), shape.num_rows, 0).astype(np.int32),
            drawn.rows,
            drawn.edits,
            np.take(
                self._slots.tables[:, :width], self._slots.of(gap.open(table_slots, 0)), axis=0
            ),
        )

    def _places(self, slots: Int64s, places: Int64s, gap: _Gap, num_tokens: int) -> Int64s:
        """`StepArrays.slots` of tokens that have these places in the tables of their slots."""
        block, within = np.divmod(places, self._block_size)
        first = slots * self._slots.num_tables
        found = [
            self._slots.tables[first + i, block].astype(np.int64) * self._block_size + within
            for i in range(self._slots.num_tables)
        ]
        filled = [_filled(gap.open(each, -1), num_tokens, -1) for each in found]
        return filled[0] if len(filled) == 1 else np.concatenate(filled)
