"""The low-rank term of an adapter (Hu et al., 2021): `x A^T B^T`, added to rows of a GEMM.

`A [r, k]` and `B [n, r]`; the adapter's scaling is in B. Sums are in fp32; so is the addition to
the GEMM's result, which is then rounded again.
"""

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 128  # of a GEMM whose rows must not depend on each other
INPUTS = 16  # it has a multiple of: else a library may sum by the alignment of a row


def add(
    y: Tensor, x: Tensor, rows: Tensor, a: Tensor, b: Tensor, first: int, is_fixed: bool
) -> None:
    """`y[rows, first : first + m] += x[rows] a^T b^T`, in place.

    Args:
        y: results, `[n, outputs]`.
        x: what was multiplied, `[n, k]`.
        rows: of the adapter, each once, `[_] i64`.
        a: shrinks, `[r, k]`.
        b: expands, `[m, r]`.
        first: output that the first row of `b` is of.
        is_fixed: whether a row's bits may not depend on how many rows there are.
    """
    here = slice(first, first + b.shape[0])
    term = _term(x[rows], a, b, is_fixed)
    y[rows, here] = (y[rows, here].float() + term).to(y.dtype)


def times(x: Tensor, w: Tensor, is_fixed: bool) -> Tensor:
    """Return `x w^T` in fp32; fixed: by GEMMs of `ROWS` rows each, of a turned copy of `w`."""
    x, count = x.float(), len(x)
    if not is_fixed:
        return functional.linear(x, w.float())
    x = functional.pad(x, (0, -x.shape[1] % INPUTS, 0, -count % ROWS))
    # As it lies, MKL for AVX2 sums the last two rows of 128 in another order than the others.
    turned = x.new_zeros(x.shape[1], len(w))
    turned[: w.shape[1]] = w.t()
    return torch.cat([each @ turned for each in torch.split(x, ROWS)])[:count]


def _term(x: Tensor, a: Tensor, b: Tensor, is_fixed: bool) -> Tensor:
    """Return `x a^T b^T` in fp32; fixed: by GEMMs of `ROWS` rows each."""
    return times(times(x, a, is_fixed), b, is_fixed)
