"""The one form in which quantised weights are kept, whatever file they come from.

Every format of a checkpoint becomes a `QuantMatrix` without a second rounding. `dequantise` is the
definition of what it stands for; whatever multiplies with it must agree with that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import E4M3 as E4M3
from slipstream.kernels.gemm.packing import e2m1_table

RowType = Literal["", "e4m3", "int8"]
MIDDLE = 8  # the zero of 4 bits without zeros
_ROWS = 1 << 22  # weights that are dequantised at a time: what fp32 needs beside the result


class Kind(Enum):
    """The type of codes."""

    W4 = "4 bits"  # integers, 0 .. 15, two in a byte, the first in the lower half
    W8 = "8 bits"  # integers, -128 .. 127
    F8 = "e4m3"
    F4 = "e2m1"  # or another table of 16 numbers; two in a byte as W4


_HALVES = (Kind.W4, Kind.F4)
_ZEROS = {Kind.W4: (MIDDLE, torch.uint8), Kind.W8: (0, torch.int8)}  # where there are none


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """Weights `[n, k]`: `((code - zero) * scale + minimum) * outer`, in the place of `order`.

    A group is `group` inputs that are neighbours among the codes, the last may be shorter. Scales
    of a tensor, of an output or of blocks are spread over rows, so that matrices can be put under
    one another as they are. Scales and minimums may be whole numbers of units, which groups `2 i`
    and `2 i + 1` have in common; `multiplied` makes numbers of them.
    """

    kind: Kind
    codes: Tensor  # [n, k] i8 or e4m3; [n, ceil(k / 2)] u8 of 4 bits
    scales: Tensor  # [n, groups] f32, f16, bf16 or e4m3; i8 or u8 of units
    group: int
    inputs: int  # k
    zeros: Tensor | None = None  # [n, groups] u8 of W4, i8 of W8; None: 8 of W4, else 0
    minimums: Tensor | None = None  # [n, groups], floating; u8 of units
    outer: Tensor | None = None  # [n] f32: a second scale
    table: Tensor | None = None  # [16] f32: of F4; None: e2m1
    order: Tensor | None = None  # [k] i64: code i belongs to input order[i]
    factors: Tensor | None = None  # [k] f32: inputs are multiplied by them first
    row_type: RowType = ""  # to which rows are to be rounded, where a GEMM takes them so
    units: Tensor | None = None  # [n, groups] f16: of scales
    low_units: Tensor | None = None  # [n, groups] f16: of minimums

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def is_symmetric(self) -> bool:
        """Whether there are neither zeros nor minimums."""
        return self.zeros is None and self.minimums is None

    @property
    def is_plain(self) -> bool:
        """Whether inputs are taken as they come."""
        return self.order is None and self.factors is None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        names = (*BY_ROW, "order", "factors")
        found = [getattr(self, name) for name in names]
        return sum(each.numel() * each.element_size() for each in found if each is not None)

    def __str__(self) -> str:
        size = "a row" if self.group >= self.inputs else f"{self.group} inputs"
        more = " with zeros" if self.zeros is not None and self.minimums is None else ""
        more += " with minimums" if self.minimums is not None else ""
        more += f" for rows in {self.row_type}" if self.row_type else ""
        name = self.kind.value if self.table is None else "a table of 16"
        return f"{name} by {size}{more}"


def halves(codes: Tensor) -> Tensor:
    """Put `[n, k]` codes of 4 bits into `[n, ceil(k / 2)]` bytes, the first in the lower half."""
    codes = codes.to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def codes_of(matrix: QuantMatrix) -> Tensor:
    """Return codes one by one, `[n, k]`: u8 of 4 bits, else as they are."""
    codes = matrix.codes
    if matrix.kind not in _HALVES:
        return codes
    if codes.is_meta:  # whose operations are slow
        return codes.new_empty(matrix.outputs, matrix.inputs)
    both = torch.stack([codes & 15, codes >> 4], dim=-1)
    return both.view(len(codes), -1)[:, : matrix.inputs]


def dequantise(matrix: QuantMatrix) -> Tensor:
    """Return what inputs are multiplied by, `[n, k]` fp32: the definition."""
    matrix = multiplied(matrix)
    values = _numbers(matrix)
    scales = spread(matrix.scales, matrix)
    values = values * scales
    if matrix.minimums is not None:
        values = values + spread(matrix.minimums, matrix)
    if matrix.outer is not None:
        values = values * matrix.outer[:, None]
    if matrix.order is not None:
        values = torch.empty_like(values).index_copy_(1, matrix.order.to(values.device), values)
    return values if matrix.factors is None else values * matrix.factors


def multiplied(matrix: QuantMatrix) -> QuantMatrix:
    """Return the same numbers with scales and minimums of no units: in fp32, which is exact."""
    if matrix.units is None:
        return matrix
    minimums = matrix.minimums
    if minimums is not None:
        assert matrix.low_units is not None, "minimums have units where scales have"
        minimums = minimums.float() * matrix.low_units.float()
    scales = matrix.scales.float() * matrix.units.float()
    return replace(matrix, scales=scales, minimums=minimums, units=None, low_units=None)


def write(matrix: QuantMatrix, out: Tensor) -> None:
    """Write what inputs are multiplied by into `out [n, k]`, some rows at a time."""
    step = max(1, _ROWS // max(1, matrix.inputs))
    for first in range(0, matrix.outputs, step):
        part = slice(first, first + step)
        out[part] = dequantise(rows(matrix, part))


BY_GROUP = ("scales", "zeros", "minimums", "units", "low_units")
BY_ROW = ("codes", "outer", *BY_GROUP)


def rows(matrix: QuantMatrix, part: slice) -> QuantMatrix:
    """Return some rows of it, which share its memory."""
    return _each(matrix, lambda each: each[part])


def selected(matrix: QuantMatrix, indices: Tensor) -> QuantMatrix:
    """Return the rows of `indices`, in that order."""
    return _each(matrix, lambda each: _bytes_of(each)[indices].view(each.dtype))


def _each(matrix: QuantMatrix, change: Callable[[Tensor], Tensor]) -> QuantMatrix:
    """Change all that has a row for each output."""
    own = {name: getattr(matrix, name) for name in BY_ROW}
    changed: dict[str, Any] = {n: None if each is None else change(each) for n, each in own.items()}
    return replace(matrix, **changed)


def _bytes_of(values: Tensor) -> Tensor:
    """Return e4m3 as bytes: no kernel joins or selects these."""
    return values.view(torch.uint8) if values.dtype == E4M3 else values


def stack(parts: Sequence[QuantMatrix]) -> QuantMatrix | None:
    """Put matrices of the same inputs under one another; None where their forms differ.

    Rows that only some of them ask for are rounded for none.
    """
    if len(parts) == 1:
        return parts[0]
    if len({each.row_type for each in parts}) > 1:
        parts = [replace(each, row_type="") for each in parts]
    if any(each.zeros is not None for each in parts):
        parts = [_with_zeros(each) for each in parts]
    first = parts[0]
    if not all(_alike(first, each) for each in parts[1:]):
        return None

    def joined(name: str) -> Tensor | None:
        found = [getattr(each, name) for each in parts]
        if found[0] is None:
            return None
        return torch.cat([_bytes_of(each) for each in found]).view(found[0].dtype)

    whole: dict[str, Any] = {name: joined(name) for name in BY_ROW}
    return replace(first, **whole)


def _with_zeros(matrix: QuantMatrix) -> QuantMatrix:
    """Return integers with zeros, also where every one is that which needs no saying."""
    if matrix.zeros is not None or matrix.kind not in _ZEROS:
        return matrix
    zero, dtype = _ZEROS[matrix.kind]
    return replace(matrix, zeros=torch.full_like(matrix.scales, zero, dtype=dtype))


def _alike(one: QuantMatrix, other: QuantMatrix) -> bool:
    """Whether two can be one."""
    same = one.scales.dtype == other.scales.dtype
    for name in ("kind", "group", "inputs"):
        same = same and getattr(one, name) == getattr(other, name)
    names = ("zeros", "minimums", "outer", "units", "low_units")
    has = all((getattr(one, n) is None) == (getattr(other, n) is None) for n in names)
    shared = ("table", "order", "factors")
    return same and has and all(_equal(getattr(one, n), getattr(other, n)) for n in shared)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.is_meta or torch.equal(one, other)


def _numbers(matrix: QuantMatrix) -> Tensor:
    """Return codes less zeros as numbers, `[n, k]` fp32."""
    codes = codes_of(matrix)
    if matrix.kind is Kind.F4:
        table = matrix.table
        if table is None:
            table = e2m1_table(codes.device)
        return table[codes.long()]
    if matrix.zeros is not None:
        return codes.float() - spread(matrix.zeros, matrix)
    return codes.float() - (MIDDLE if matrix.kind is Kind.W4 else 0)


def spread(values: Tensor, matrix: QuantMatrix) -> Tensor:
    """Spread `[n, groups]` of a matrix over its inputs, `[n, k]` fp32."""
    values = values.float()
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(matrix.group, 1)[:, : matrix.inputs]


def widened(parts: Sequence[QuantMatrix]) -> list[QuantMatrix] | None:
    """Return matrices of whole numbers in one form, which has room for all of them, unrounded.

    That is 8 bits by the smallest group, with minimums if any has such; None: they have more.
    """
    parts = [multiplied(each) for each in parts]
    group = min(each.group for each in parts)
    for each in parts:
        more = (each.outer, each.order, each.factors)
        is_whole = each.kind is Kind.W4 or (each.kind is Kind.W8 and each.zeros is None)
        if not is_whole or any(x is not None for x in more) or each.group % group:
            return None
    has = any(each.minimums is not None for each in parts)
    return [_in_bytes(each, group, has) for each in parts]


def _in_bytes(matrix: QuantMatrix, group: int, has_minimums: bool) -> QuantMatrix:
    codes, times = codes_of(matrix), matrix.group // group
    if matrix.kind is Kind.W4:
        zeros = MIDDLE if matrix.zeros is None else spread(matrix.zeros, matrix)
        codes = (codes - zeros).to(torch.int8)
    count = -(-matrix.inputs // group)

    def by_group(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(times, 1)[:, :count]

    scales, minimums = by_group(matrix.scales), None
    if has_minimums:
        own = matrix.minimums
        minimums = torch.zeros_like(scales) if own is None else by_group(own)
    return QuantMatrix(Kind.W8, codes, scales, group, matrix.inputs, None, minimums)
