"""Take some inputs of a quantised matrix, without a rounding: codes stay what they are.

A part that begins or ends within a group has smaller groups, the largest that both divide. Inputs
that were sorted by their groups are so in the part, too, where groups have no common size any more:
then each input has a scale of its own.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.quant.matrix import (
    BY_GROUP,
    E4M3,
    MIDDLE,
    Kind,
    QuantMatrix,
    codes_of,
    halves,
    multiplied,
)

_HALVES = (Kind.W4, Kind.F4)


def inputs_of(matrix: QuantMatrix, begin: int, count: int) -> QuantMatrix:
    """Return a matrix of the inputs `begin .. begin + count`, at least one."""
    order = matrix.order
    if order is not None or begin % (2 * matrix.group):  # pairs of groups are others then
        matrix = multiplied(matrix)
    if order is None:
        groups = [i // matrix.group for i in range(begin, begin + count)]
        codes = codes_of(matrix)[:, begin : begin + count]
    else:
        places = ((order >= begin) & (order < begin + count)).nonzero().flatten()
        groups = (places // matrix.group).tolist()
        codes = as_bytes(codes_of(matrix))[:, places].view(codes_of(matrix).dtype)
        order = order[places] - begin
        if torch.equal(order, torch.arange(count, device=order.device)):
            order = None
    part = replace(
        matrix,
        codes=halves(codes) if matrix.kind in _HALVES else codes.contiguous(),
        inputs=count,
        order=order,
        factors=None if matrix.factors is None else matrix.factors[begin : begin + count],
    )
    return regrouped(part, groups)


def regrouped(matrix: QuantMatrix, groups: list[int]) -> QuantMatrix:
    """Return a matrix whose code i has the scale `groups[i]` of this one: in groups of one size."""
    borders = [i for i, (one, other) in enumerate(pairwise(groups), start=1) if one != other]
    group = math.gcd(*borders) if borders else len(groups)
    matrix = matrix if group == matrix.group else multiplied(matrix)
    kept = torch.tensor(groups[::group])
    return replace(matrix, group=group, **_each(matrix, lambda x: _columns(x, kept)))


def in_groups(matrix: QuantMatrix, group: int) -> QuantMatrix:
    """Return the same numbers in groups of `group`, which divides those that there are."""
    matrix = matrix if group == matrix.group else multiplied(matrix)
    kept = torch.arange(0, matrix.inputs, group) // matrix.group
    return replace(matrix, group=group, **_each(matrix, lambda x: _columns(x, kept)))


def padded(matrix: QuantMatrix, count: int) -> QuantMatrix:
    """Return a matrix of `count` inputs, of which those behind the last change no result."""
    stored, order, factors = matrix.inputs, matrix.order, matrix.factors
    if count == stored:
        return matrix
    codes = functional.pad(as_bytes(codes_of(matrix)), (0, count - stored))
    by_row = matrix.scales.shape[1] == 1 and matrix.is_symmetric and matrix.kind is not Kind.F4
    group = math.gcd(matrix.group, stored) if matrix.group < stored else stored
    whole: dict[str, Any] = {}
    if by_row:
        group = count
        codes[:, stored:] = MIDDLE if matrix.kind is Kind.W4 else 0
    else:  # groups of their own, of zeros
        matrix, more = in_groups(matrix, group), -(-count // group) - stored // group
        whole = _each(matrix, lambda x: with_zeros(x, more))
    if order is not None:
        order = torch.cat([order, torch.arange(stored, count, device=order.device)])
    if factors is not None:
        factors = functional.pad(factors, (0, count - stored), value=1.0)
    four = matrix.kind in _HALVES
    codes = halves(codes) if four else codes.view(matrix.codes.dtype)
    made = replace(matrix, codes=codes, group=group, inputs=count, order=order, factors=factors)
    return replace(made, **whole)


def of_zeros(matrix: QuantMatrix) -> QuantMatrix:
    """Return a matrix of the same sizes whose every number is zero."""
    zeros: dict[str, Any] = {"scales": torch.zeros_like(matrix.scales)}
    if matrix.minimums is not None:
        zeros["minimums"] = torch.zeros_like(matrix.minimums)
    return replace(matrix, **zeros)


def as_bytes(x: Tensor) -> Tensor:
    """View e4m3 as bytes, which every operation takes."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def _each(matrix: QuantMatrix, change: Any) -> dict[str, Any]:
    """Return what a change makes of all that groups have."""
    found = {name: getattr(matrix, name) for name in BY_GROUP}
    return {name: None if x is None else change(x) for name, x in found.items()}


def _columns(x: Tensor, places: Tensor) -> Tensor:
    """Return columns of what has one for each group, or one for all of them."""
    return as_bytes(x)[:, places.to(x.device)].view(x.dtype) if x.shape[1] > 1 else x


def with_zeros(x: Tensor, more: int) -> Tensor:
    """Return a tensor with zeros behind its columns."""
    return functional.pad(as_bytes(x), (0, more)).view(x.dtype)
