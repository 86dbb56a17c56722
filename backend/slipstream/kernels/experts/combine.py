"""The sum of a row's experts, added to the residual sum."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_MAX_THREADS = 256


class Shared(NamedTuple):
    """Outputs of the expert of all rows."""

    values: Tensor  # [n, h], contiguous
    gate: Tensor | None = None  # [n, 1], logits of its gate, if it has one

    @property
    def weighed(self) -> Tensor:
        """What is added to rows, `[n, h]`, in fp32."""
        return self.values.float() * (1.0 if self.gate is None else self.gate.float().sigmoid())


def shared_arguments(shared: Shared | None) -> tuple[jit.Argument, ...]:
    """Return what kernels take of a shared expert: values, gate, and the stride of the gate."""
    if shared is None:
        return None, None, 0
    return shared.values, shared.gate, 0 if shared.gate is None else shared.gate.stride(0)


@op("residual[n,h]:T, terms[p,h]:T", package=__package__)
def combine(residual: Tensor, terms: Tensor, shared: Shared | None = None) -> Tensor:
    """Add a row's `p / n` terms, and what is shared, to `residual`; return it.

    Terms are added in the order of ranks, and the shared one last: in fp32, rounded once.

    Args:
        residual: changed in place.
        terms: outputs of pairs, times their weights.
        shared: what the expert of all rows gives, if there is one.
    """
    num_rows, width = residual.shape
    if num_rows == 0:
        return residual
    total = residual.float()
    for term in terms.view(num_rows, -1, width).unbind(1):
        total = total + term.float()
    if shared is not None:
        total = total + shared.weighed
    return residual.copy_(total)


def _variant(dtype: torch.dtype) -> jit.Variant:
    return jit.variant("experts/combine.cu", dtype, VECTOR=16 // dtype.itemsize)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in jit.DTYPES:
        yield _variant(dtype)


@combine.cuda
def _combine(residual: Tensor, terms: Tensor, shared: Shared | None = None) -> Tensor:
    jit.type_name(residual.dtype)
    num_rows, width = residual.shape
    others = [terms] if shared is None else [terms, shared.values]
    vector = 16 // residual.element_size()
    jit.require(
        jit.vector_width(width, residual, *others) == vector,
        "combine: rows of {} elements are not aligned to 16 bytes",
        width,
    )
    jit.require(all(each.is_contiguous() for each in others), "combine: terms must be contiguous")
    if residual.numel() == 0:
        return residual
    accesses = width // vector
    shares = -(-accesses // _MAX_THREADS)
    threads = 32 * -(-accesses // (32 * shares))
    given = (terms, *shared_arguments(shared))
    args = (residual, residual.stride(0), *given, width, len(terms) // num_rows)
    wanted = _variant(residual.dtype)
    jit.launch(wanted, "combine", (num_rows, shares), threads, *args, overlaps=True)
    return residual
