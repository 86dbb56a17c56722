"""What kernels of experts are built for, whatever their tiles."""

import itertools
from typing import NamedTuple

import torch

from slipstream.kernels.runtime import jit

DTYPES = (torch.float16, torch.bfloat16)  # that have kernels
MULTIPLE = 8  # of which widths and outputs are, on a GPU; widths of e4m3 of twice as many
GATES = ((False, False), (True, False), (True, True))  # is it gated, and do adapters add to it


class Kind(NamedTuple):
    """Rows and weights of a kernel of experts, and what it does to sums."""

    dtype: torch.dtype  # of rows
    is_fp8: bool  # weights are
    is_gated: bool  # weights are gates and ups
    is_adapted: bool  # adapters add to gates and ups

    def variant(self, source: str, **sizes: int) -> jit.Variant:
        """Name the variant of a source, which has these macros, too."""
        macros = {"FP8": int(self.is_fp8), **gate_macros(self.is_gated, self.is_adapted)}
        return jit.variant(source, self.dtype, **macros, **sizes)


def gate_macros(is_gated: bool, is_adapted: bool) -> dict[str, int]:
    """Return the macros of a kernel whose sums are gated, or not, and added to, or not."""
    return {"GATED": int(is_gated), **({"TERMS": 1} if is_adapted else {})}


KINDS = tuple(
    Kind(dtype, is_fp8, *gates)
    for dtype, is_fp8, gates in itertools.product(DTYPES, (False, True), GATES)
)
