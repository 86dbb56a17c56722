"""A batch as numpy arrays: what a step copies to the device."""

from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.batch import Batch, Row

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]


class TokenArrays(NamedTuple):
    """`n` tokens of `s` rows: decodes (one token each) first, then chunks.

    After the first two, the tensors of `AttentionInputs` in order.
    """

    token_ids: NDArray[np.int64]  # [n]
    sample_rows: NDArray[np.int64]  # [r], of the n tokens
    positions: NDArray[np.int64]  # [n]
    slots: NDArray[np.int64]  # [n]
    block_tables: NDArray[np.int32]  # [s, longest]
    query_starts: NDArray[np.int32]  # [s - decodes + 1]
    lengths: NDArray[np.int32]  # [s]


def _block_tables(rows: tuple[Row, ...]) -> NDArray[np.int32]:
    """`[rows, longest]`, padded with block 0, whose content is never used."""
    counts = np.array([len(row.block_ids) for row in rows], np.int64)
    tables = np.zeros((len(rows), int(counts.max())), np.int32)
    flat = np.fromiter(chain.from_iterable(row.block_ids for row in rows), np.int32, counts.sum())
    tables[np.arange(tables.shape[1]) < counts[:, None]] = flat
    return tables


def token_arrays(batch: Batch, block_size: int) -> TokenArrays:
    """What the model reads of a batch."""
    rows, num_decodes = batch.rows, batch.num_decodes
    counts = np.array([len(row.token_ids) for row in rows], np.int64)
    first_positions = np.array([row.start for row in rows], np.int64)
    ends = counts.cumsum()
    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(len(owners)) - (ends - counts - first_positions)[owners]
    tables = _block_tables(rows)
    blocks = tables[owners, positions // block_size].astype(np.int64)
    return TokenArrays(
        np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, len(owners)),
        (ends - 1)[[row.samples for row in rows]],
        positions,
        blocks * block_size + positions % block_size,
        tables,
        (np.append(0, ends)[num_decodes:] - num_decodes).astype(np.int32),
        (first_positions + counts).astype(np.int32),
    )


def pad_decodes(tokens: TokenArrays, num_rows: int, num_blocks: int) -> TokenArrays:
    """Decodes with rows added up to `num_rows`, and tables as wide as `num_blocks`.

    An added row has length 0 and slot -1: it reads no cache, writes none, and its output is unused.
    """

    def extended(array: NDArray[np.int64], fill: int) -> NDArray[np.int64]:
        return np.append(array, np.full(num_rows - len(array), fill, array.dtype))

    count, width = tokens.block_tables.shape
    tables = np.zeros((num_rows, num_blocks), np.int32)
    tables[:count, :width] = tokens.block_tables
    lengths = np.zeros(num_rows, np.int32)
    lengths[:count] = tokens.lengths
    return TokenArrays(
        extended(tokens.token_ids, 0),
        np.arange(num_rows),
        extended(tokens.positions, 0),
        extended(tokens.slots, -1),
        tables,
        tokens.query_starts,
        lengths,
    )


def sampling_arrays(rows: list[Row]) -> list[Array]:
    """The fields of `SamplingInputs`, in order."""
    params = [row.sampling for row in rows]
    edits = [(i, edit) for i, row in enumerate(rows) for edit in row.edits]
    return [
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([row.seed % 2**64 for row in rows], np.uint64).view(np.int64),
        np.array([row.num_outputs for row in rows], np.int64),
        np.array([i for i, _ in edits], np.int64),
        np.array([edit.token_id for _, edit in edits], np.int64),
        np.array([edit.factor for _, edit in edits], np.float32),
        np.array([edit.addend for _, edit in edits], np.float32),
    ]
