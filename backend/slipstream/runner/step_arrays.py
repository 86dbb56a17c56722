"""A step as numpy arrays in one piece of memory: the inputs that it copies to the device."""

from collections.abc import Iterable
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.kernels.sampling.sample import EDIT_WORDS, ROW_WORDS
from slipstream.runner.sampling_rows import RESULT
from slipstream.runner.step_shape import StepShape

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]
Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_ALIGNMENT = 16  # bytes
_I32, _I64 = np.dtype(np.int32), np.dtype(np.int64)


def aligned(size: int) -> int:
    """Return where the next array begins, after one of so many bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def side_by_side(parts: Iterable[tuple[np.dtype[Any], tuple[int, ...]]]) -> tuple[Bytes, list[Any]]:
    """Zeros: a memory, and in it arrays of these dtypes and shapes, one `aligned` after another."""
    parts = list(parts)
    ends = [*accumulate([aligned(dtype.itemsize * prod(shape)) for dtype, shape in parts])]
    memory, begins = np.zeros(ends[-1], np.uint8), [0, *ends[:-1]]
    return memory, [
        np.ndarray(shape, dtype, memory, begin)
        for (dtype, shape), begin in zip(parts, begins, strict=True)
    ]


class StepArrays(NamedTuple):
    """A step of a `StepShape`: `n` tokens of `s` rows, `r` of which are sampled.

    Padding, which only fills a shape, reads and writes no cache and samples nothing. All arrays
    lie in one memory, in this order, each `aligned`.
    """

    header: Int32s  # [3]: see `kernels.staging.stage.start_step`
    token_ids: Int64s  # [n]
    sources: Int32s  # [n]; >= 0: the token is this one of the results
    sample_rows: Int64s  # [r], of the n tokens: the decodes, then the last ones of chunks
    positions: Int64s  # [n]
    slots: Int64s  # [t * n], of each of t tables where in the cache K and V go; -1: nowhere
    query_starts: Int32s  # [s - decodes + 1]
    sample_starts: Int32s  # [s - decodes + 1]: query_starts if sample_rows were all tokens
    lengths: Int32s  # [s]; 0: no row
    rows: Int32s  # [r, ROW_WORDS], of `SamplingInputs`
    edits: Int32s  # [e, 2], of `SamplingInputs`; one at least: an empty tensor has no address
    tables: Int32s  # [rows of the batch * t, longest table], a row's t tables together

    @property
    def memory(self) -> Bytes:
        """All of them."""
        memory = self.header.base
        assert memory is not None
        return memory

    @property
    def samples(self) -> Int64s:
        """Indices of those `sample_rows` that are sampled."""
        return (self.rows[:, RESULT] >= 0).nonzero()[0]

    @classmethod
    def of(
        cls, shape: StepShape, num_tables: int, num_edits: int, tables: tuple[int, int]
    ) -> "StepArrays":
        """Make a step of padding alone; `tables` is the shape of those."""
        n, r = shape.num_tokens, shape.num_samples
        memory, made = side_by_side(
            [
                (_I32, (3,)),
                (_I64, (n,)),
                (_I32, (n,)),
                (_I64, (r,)),
                (_I64, (n,)),
                (_I64, (num_tables * n,)),
                (_I32, (shape.num_rows - shape.num_decodes + 1,)),
                (_I32, (shape.num_rows - shape.num_decodes + 1,)),
                (_I32, (shape.num_rows,)),
                (_I32, (r, ROW_WORDS)),
                (_I32, (max(1, num_edits), EDIT_WORDS)),
                (_I32, tables),
            ]
        )
        arrays = cls(*made)
        num_words = (len(memory) - aligned(arrays.tables.nbytes)) // 4
        arrays.header[:] = (num_words, tables[1], tables[0])
        arrays.sources.fill(-1)
        arrays.slots.fill(-1)
        return arrays
