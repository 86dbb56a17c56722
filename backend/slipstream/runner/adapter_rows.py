"""The adapters of a step, and which of them each token has."""

from collections.abc import Mapping

import numpy as np

from slipstream.core.batch import Batch
from slipstream.runner.adapter_forms import Loaded
from slipstream.runner.step_arrays import Int64s, StepArrays
from slipstream.runner.step_shape import StepShape, gap_of

Active = Mapping[int, Loaded]  # the adapters of a step, by number
OfStep = tuple[Active, Int64s, StepShape, StepArrays]  # with the adapter of each token
NONE: Int64s = np.empty(0, np.int64)  # of a step in which no row has any


def adapters_of(batch: Batch, shape: StepShape) -> Int64s:
    """Return the adapter of each token of a step, `[num_tokens]`; 0: none, or padding."""
    numbers = np.zeros(shape.num_tokens, np.int64)
    count, (_, gap) = batch.num_decodes, gap_of(batch, shape)
    numbers[:count] = [row.adapter for row in batch.rows[:count]]
    chunks = batch.rows[count:]
    sizes = [len(row.token_ids) for row in chunks]
    begin = count + gap
    numbers[begin : begin + sum(sizes)] = np.repeat([row.adapter for row in chunks], sizes)
    return numbers
