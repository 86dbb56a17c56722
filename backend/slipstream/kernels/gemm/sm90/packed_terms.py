"""What GEMMs of packed weights need beside terms of adapters (`packed_terms.cuh`)."""

from torch import Tensor

from slipstream.kernels.gemm.op import (
    COUNTS,
    MOST_ADAPTED_ROWS,
    MOST_SPLITS,
    WHOLE_ROWS,
    Spec,
    TermTable,
    width_of,
)
from slipstream.kernels.gemm.packed import shared_refusal

THREADS = 64
BYTES = 7 << 10  # of shared memory beside the terms: tables and t
_SPLIT = 1024  # inputs of a part of a row of A


def num_bytes(num_rows: int, outputs: int) -> int:
    """Count the bytes of shared memory of the terms of so many outputs a row."""
    return 4 * num_rows * outputs


def refusal(spec: Spec) -> str | None:
    """Say why no such GEMM takes terms; None: one may."""
    if (why := shared_refusal(spec, MOST_ADAPTED_ROWS)) is not None:
        return why
    if spec.inputs > MOST_SPLITS * _SPLIT:
        return f"takes {MOST_SPLITS * _SPLIT} inputs at most beside terms of adapters"
    return None


def behind(x: Tensor, terms: TermTable) -> tuple[Tensor | int, ...]:
    """Return a kernel's last arguments; `x` are rows as they come."""
    width = width_of(terms.scratch)
    t = terms.scratch[COUNTS + WHOLE_ROWS * width :]
    one, two, *_ = (*terms.sizes, 0)
    table = (terms.groups, len(terms.groups), terms.rows, terms.place, x, x.stride(0))
    return *table, terms.scratch[2:], t, width, one, two
