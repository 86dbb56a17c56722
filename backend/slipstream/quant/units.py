"""Make one form of 8 bits of GGUF's types of blocks, for GEMMs that fuse several of them.

Files named Q4_K_M have some values in Q6_K beside queries and keys in Q4_K; one GEMM takes all of
them as whole numbers, with scales by 16 inputs that are whole numbers of units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.quant.matrix import MIDDLE, Kind, QuantMatrix, codes_of, spread

GROUP = 16
_GROUPS = (GROUP, 2 * GROUP)


def in_units(parts: Sequence[QuantMatrix]) -> list[QuantMatrix] | None:
    """Return matrices in one form, unrounded; None: some have other groups, or more than a group.

    They have minimums if any has such.
    """
    if not all(_is_of_blocks(each) for each in parts):
        return None
    has = any(each.minimums is not None for each in parts)
    return [_by_16(each, has) for each in parts]


def _is_of_blocks(matrix: QuantMatrix) -> bool:
    more = (matrix.outer, matrix.order, matrix.factors)
    is_whole = matrix.kind is Kind.W4 or (matrix.kind is Kind.W8 and matrix.zeros is None)
    if not is_whole or any(x is not None for x in more) or matrix.group not in _GROUPS:
        return False
    if matrix.units is not None:
        return True
    own = [each for each in (matrix.scales, matrix.minimums) if each is not None]
    is_half = all(each.dtype == torch.float16 for each in own)
    return is_half and matrix.group == 2 * GROUP  # neighbours by 16 then have one unit


def _by_16(matrix: QuantMatrix, has_minimums: bool) -> QuantMatrix:
    codes, times = codes_of(matrix), matrix.group // GROUP
    if matrix.kind is Kind.W4:
        zeros = MIDDLE if matrix.zeros is None else spread(matrix.zeros, matrix)
        codes = (codes - zeros).to(torch.int8)

    def each_16(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.repeat_interleave(times, 1).to(dtype)

    scales, units = _in_units(matrix.scales, matrix.units)
    minimums = low_units = None
    if has_minimums:
        low = torch.zeros_like(units) if matrix.minimums is None else matrix.minimums
        minimums, low_units = _in_units(low, matrix.low_units)
        minimums, low_units = each_16(minimums, torch.uint8), each_16(low_units, torch.float16)
    return QuantMatrix(
        Kind.W8,
        codes,
        each_16(scales, torch.int8),
        GROUP,
        matrix.inputs,
        minimums=minimums,
        units=each_16(units, torch.float16),
        low_units=low_units,
    )


def _in_units(values: Tensor, units: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return whole numbers and their units: of those that have none, ones."""
    return (torch.ones_like(values), values) if units is None else (values, units)
