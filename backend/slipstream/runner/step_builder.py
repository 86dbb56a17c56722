"""Make a batch's `StepArrays`, from those of the step before where these can serve.

Fields that a sequence keeps while it runs (`Slots`) are written once, then only their changes; so
a step of decodes costs a few microseconds of numpy and next to nothing a row. A step of one prompt
is what a request waits for on an idle device, where each numpy function is slow the first time: it
takes few of them.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from slipstream.core.batch import Batch, Row
from slipstream.kernels.sampling.constrain import MASK_TAG
from slipstream.kernels.sampling.sample import EDIT_WORDS
from slipstream.runner.sampling_rows import NUMBER, RESULT, fill_rows, move_rows
from slipstream.runner.slots import Slots
from slipstream.runner.step_arrays import Int64s, StepArrays, aligned
from slipstream.runner.step_shape import Layout, StepShape, gap_of


class _Built(NamedTuple):
    """A step of decodes alone, and where its rows have what."""

    shape: StepShape
    slots: list[int]  # of the rows
    tables: Int64s  # of `Slots`
    every: Int64s  # numbers from 0, one for each of these
    owners: Int64s | slice  # the row of each
    places: Int64s | slice  # of each in the step's `slots`
    arrays: StepArrays

    @classmethod
    def of(cls, shape: StepShape, slots: Int64s, all_slots: Slots, arrays: StepArrays) -> "_Built":
        """Remember a step of the sequences that have these slots."""
        tables, num_tables = all_slots.of(slots), all_slots.num_tables
        every, own = np.arange(len(tables)), slots.tolist()
        if num_tables == 1:
            return cls(shape, own, tables, every, slice(None), slice(len(tables)), arrays)
        owners, number = np.divmod(every, num_tables)
        return cls(shape, own, tables, every, owners, number * shape.num_tokens + owners, arrays)


class StepBuilder:
    """Makes the arrays of steps.

    Args:
        slots: fields of the sequences.
        block_size: tokens of a block.
        layout: of the shapes.
        has_gaps: whether tables may lack blocks outside the window.
    """

    def __init__(
        self, slots: Slots, block_size: int, layout: Layout | None = None, has_gaps: bool = False
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._has_gaps = has_gaps
        self.layout = layout or Layout()
        self._every_table = np.arange(slots.num_tables)[:, None]
        self._last: _Built | None = None

    def build(
        self, batch: Batch, shape: StepShape, first_result: int, first_source: int
    ) -> StepArrays:
        """The batch in a shape that is at least as large as its own.

        Args:
            batch: the step.
            shape: of the arrays.
            first_result: where in the results this step's samples begin.
            first_source: where those of the step before began.
        """
        last, self._last = self._last, None
        if last is not None and self._is_next(last, batch, shape):
            self._last = self._next(last, batch, first_result, first_source)
            return self._last.arrays
        row_slots, arrays = self._build(batch, shape, first_result, first_source)
        if batch.num_decodes == len(batch.rows) and not batch.has_own:
            self._last = _Built.of(shape, row_slots, self._slots, arrays)
        return arrays

    def padding(self, shape: StepShape) -> StepArrays:
        """Return a step without rows; the next one is built as if it were not there."""
        return self._build(Batch((), 0), shape, 0, 0)[1]

    def _is_next(self, last: _Built, batch: Batch, shape: StepShape) -> bool:
        """Whether a step has the rows of the last one, of whatever sequences, and no edits."""
        if self._has_gaps or last.shape != shape or not batch.rows:
            return False
        if not batch.continues:
            is_decodes = batch.num_decodes == len(batch.rows)
            if not is_decodes or last.slots != [row.slot for row in batch.rows]:
                return False
        return not batch.has_own

    def _next(self, last: _Built, batch: Batch, first_result: int, first_source: int) -> _Built:
        """Every row as it was in the last step, but for what has changed."""
        rows, count, size, arrays = batch.rows, len(batch.rows), self._block_size, last.arrays
        changed: list[int] = []  # tables
        if batch.continues:  # one token further, which is the sample that it was in the last step
            arrays.positions[:count] += 1
            arrays.sources[:count] = np.arange(first_source, first_source + count)
            arrays.rows[:count, NUMBER] += 1
        else:
            changed = self._put_known(arrays, rows, first_source)
        arrays.lengths[:count] = arrays.positions[:count] + 1
        last_blocks, within = np.divmod(arrays.positions[last.owners][: len(last.tables)], size)
        found = self._slots.grow(rows, last.tables, last_blocks + 1)
        grown: Int64s | slice = (
            np.array([*found.tolist(), *changed], np.int64) if changed else found
        )
        width = int(last_blocks.max()) + 1
        if width != arrays.tables.shape[1]:
            arrays, grown = self._widened(last, width), slice(None)
        arrays.tables[grown] = self._slots.tables[last.tables[grown], :width]
        blocks = arrays.tables[last.every, last_blocks].astype(np.int64)
        arrays.slots[last.places] = blocks * size + within
        arrays.rows[:count, MASK_TAG] = 0
        arrays.rows[:count, RESULT] = np.arange(first_result, first_result + count)
        return last._replace(arrays=arrays)

    def _put_known(self, arrays: StepArrays, rows: tuple[Row, ...], first_source: int) -> list[int]:
        """Write the tokens of decodes; return numbers of the tables that are written anew."""
        count, num_tables, changed = len(rows), self._slots.num_tables, list[int]()
        for number, row in enumerate(rows):
            if row.is_new:
                packed = self._slots.write_row(row)
                arrays.rows[number] = np.frombuffer(packed, np.int32)
                changed += range(number * num_tables, (number + 1) * num_tables)
        sources = np.array([row.source for row in rows], np.int32)
        sources[sources >= 0] += first_source
        arrays.token_ids[:count] = [row.token_ids[0] for row in rows]
        arrays.sources[:count] = sources
        arrays.positions[:count] = [row.start for row in rows]
        arrays.rows[:count, NUMBER] = [row.num_outputs for row in rows]
        return changed

    def _widened(self, last: _Built, width: int) -> StepArrays:
        """Return its arrays, with room for longer tables."""
        old = last.arrays
        arrays = StepArrays.of(last.shape, self._slots.num_tables, 0, (len(old.tables), width))
        begin, end = aligned(old.header.nbytes), 4 * int(old.header[0])  # but header and tables
        arrays.memory[begin:end] = old.memory[begin:end]
        return arrays

    def _build(
        self, batch: Batch, shape: StepShape, first_result: int, first_source: int
    ) -> tuple[Int64s, StepArrays]:
        """The slots of the rows, and `build`."""
        rows, count = batch.rows, batch.num_decodes
        slots, (begin, gap) = self._slots.update(rows), gap_of(batch, shape)
        sizes = [1] * count + [len(row.token_ids) for row in rows[count:]]
        lengths = [row.start + n - row.gap for row, n in zip(rows, sizes, strict=True)]
        width = -(-max(lengths, default=0) // self._block_size)
        sampling = [row for row in rows if row.samples]
        edits = [row.edits for row in sampling]
        listed = slots if self.layout.has_chunks else slots.repeat(sizes)
        if gap:
            parts = (listed[:begin], np.zeros(gap, np.int64), listed[begin:])
            listed = np.concatenate(parts)
        listed = self._slots.of(listed)
        num_edits = sum(map(len, edits)) // (4 * EDIT_WORDS)
        arrays = StepArrays.of(shape, self._slots.num_tables, num_edits, (len(listed), width))
        arrays.tables[:] = self._slots.tables[listed, :width]
        packed, numbers = self._slots.packed(sampling), [row.num_outputs for row in sampling]
        if count:
            self._put_decodes(arrays, rows[:count], slots[:count], first_source)
        if count < len(rows):
            self._put_chunks(arrays, rows[count:], slots[count:], sizes[count:], count + gap)
        ends = [*accumulate(sizes)]
        last_tokens = [gap + ends[i] - 1 for i in range(count, len(rows)) if rows[i].samples]
        tokens = [*range(count), *last_tokens]
        samples: slice | Int64s = slice(len(tokens))
        if gap:
            samples = np.r_[:count, count + gap : len(tokens) + gap]
        arrays.sample_rows[samples] = tokens
        fill_rows(arrays.rows, arrays.edits, samples, packed, numbers, edits, first_result)
        if any(row.moved for row in sampling):
            move_rows(arrays.rows, arrays.samples.tolist(), [row.moved for row in sampling])
        if self.layout.has_chunks:
            arrays.lengths[:count] = lengths[:count]
            arrays.lengths[count + gap : len(rows) + gap] = lengths[count:]
        else:
            ends = [*range(1, sum(sizes) + 1)]
        starts = [0, *(end - begin for end in ends[begin:])]
        arrays.query_starts[: len(starts)] = starts
        arrays.query_starts[len(starts) :] = starts[-1]
        sampled = np.array(tokens[begin:], np.int64) - shape.num_decodes
        arrays.sample_starts[:] = sampled.searchsorted(arrays.query_starts)
        return slots, arrays

    def _put_decodes(
        self, arrays: StepArrays, rows: tuple[Row, ...], slots: Int64s, first_source: int
    ) -> None:
        """The first tokens, each of a row of its own; `slots` are those of the rows."""
        count = len(rows)
        sources = np.array([row.source for row in rows], np.int32)
        sources[sources >= 0] += first_source
        arrays.token_ids[:count] = [row.token_ids[0] for row in rows]
        arrays.sources[:count] = sources
        arrays.positions[:count] = [row.start for row in rows]
        self._put_places(arrays, slice(count), slots, rows, 1)

    def _put_chunks(
        self,
        arrays: StepArrays,
        rows: tuple[Row, ...],
        slots: Int64s,
        sizes: list[int],
        begin: int,
    ) -> None:
        """The tokens from `begin` on, so many of each row."""
        end = begin
        for row, size in zip(rows, sizes, strict=True):
            tokens = slice(end, end := end + size)
            arrays.token_ids[tokens] = row.token_ids
            arrays.positions[tokens] = np.arange(row.start, row.start + size)
        owners = slots if len(rows) == 1 else slots.repeat(sizes)
        self._put_places(arrays, slice(begin, end), owners, rows, sizes)

    def _put_places(
        self,
        arrays: StepArrays,
        tokens: slice,
        slots: Int64s,
        rows: tuple[Row, ...],
        sizes: int | list[int],
    ) -> None:
        """Write where keys and values of these tokens go, so many of each row.

        `slots` has the slot of each token, or one slot of all.
        """
        places = arrays.positions[tokens]  # in the tables
        if self._has_gaps:
            places = places - np.repeat([row.gap for row in rows], sizes)
        if not self.layout.has_chunks:
            arrays.lengths[tokens] = places + 1
        block, within = np.divmod(places, self._block_size)
        num_tables = self._slots.num_tables
        found = arrays.slots.reshape(num_tables, -1)[:, tokens]
        found[:] = self._slots.tables[slots * num_tables + self._every_table, block]
        found *= self._block_size
        found += within
