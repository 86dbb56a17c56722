"""What a sequence keeps while it runs: its block tables, and how its rows are sampled."""

import numpy as np

from slipstream.core.batch import Row
from slipstream.runner.sampling_rows import pack_row
from slipstream.runner.step_arrays import Int64s


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
        for row in rows:
            if row.is_new:
                self.write_row(row)
        if not all(row.is_new for row in rows):
            sizes = [len(table) for row in rows for table in row.tables]
            self.grow(rows, self.of(slots), np.array(sizes, np.int64))
        return slots

    def write_row(self, row: Row) -> bytes:
        """Write all of a row: its slot is new to its sequence, or all that it has there is.

        Returns its `packed`.
        """
        for place, blocks in enumerate(row.tables, row.slot * self.num_tables):
            self.tables[place, : len(blocks)] = blocks
            self._num_blocks[place] = len(blocks)
        packed = self._packed[row.slot] = pack_row(row.sampling, row.seed, row.slot)
        return packed

    def of(self, slots: Int64s) -> Int64s:
        """Which of `tables` are theirs."""
        if self.num_tables == 1:
            return slots
        return (slots[:, None] * self.num_tables + np.arange(self.num_tables)).ravel()

    def grow(self, rows: tuple[Row, ...], tables: Int64s, num_blocks: Int64s) -> Int64s:
        """Take in the blocks of the rows' tables that have had fewer than `num_blocks`; which."""
        grown = (self._num_blocks[tables] < num_blocks).nonzero()[0]
        for i, place in zip(grown.tolist(), tables[grown].tolist(), strict=True):
            number, table = divmod(i, self.num_tables)
            blocks, begin = rows[number].tables[table], int(self._num_blocks[place])
            end = self._num_blocks[place] = len(blocks)
            self.tables[place, begin:end] = blocks[begin:]
        return grown

    def packed(self, rows: list[Row]) -> list[bytes]:
        """Return how to sample each row, but for what changes with every step."""
        packed = self._packed
        return [packed[row.slot] for row in rows]
