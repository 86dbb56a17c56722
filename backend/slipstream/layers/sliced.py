"""GEMMs whose rows do not depend on each other, bit for bit.

Which kernel runs a GEMM, and with it the order of a row's sums, depends on the number of rows. So
every GEMM of the deterministic mode has the same number. The inputs of a step are filled up to a
multiple of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 128


def slices(num_rows: int) -> list[slice]:
    """Cut rows into parts of `ROWS`; no rows are one part of none."""
    assert num_rows % ROWS == 0, f"{num_rows} rows are no multiple of {ROWS}"
    return [slice(begin, begin + ROWS) for begin in range(0, max(1, num_rows), ROWS)]


def sliced(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Make a function of rows `[n, k]` that computes a slice at a time."""

    def by_slices(x: Tensor) -> Tensor:
        parts = [function(x[part]) for part in slices(len(x))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return by_slices
