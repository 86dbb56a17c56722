"""Move whole rows and columns of quantised matrices, without a rounding: codes stay what they are.

Rows take their scales along. Columns stay where groups have them, and `order` says which input each
belongs to. Zeros of padded heads are codes whose scales are zero.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.axes import Change, Moves
from slipstream.quant.matrix import (
    BY_ROW,
    MIDDLE,
    Kind,
    QuantMatrix,
    codes_of,
    halves,
    multiplied,
)
from slipstream.quant.parts import as_bytes, in_groups, with_zeros


def moved(matrix: QuantMatrix, moves: Moves, name: str) -> QuantMatrix:
    """Return the decoder's matrix; raises `CheckpointError` for changes that do not move numbers.

    `name` is that of the stored matrix, with its file.
    """
    device = "cpu" if matrix.codes.is_meta else matrix.codes.device
    with numbers_moved(name):
        if moves.rows is not None:
            matrix = with_rows(matrix, places(moves.rows, matrix.outputs, 0, device))
        if moves.columns is not None:
            matrix = with_columns(matrix, places(moves.columns, matrix.inputs, 1, device))
    return matrix


@contextmanager
def numbers_moved(name: str) -> Iterator[None]:
    """Raise `CheckpointError` in the place of the RuntimeError of what does not move numbers.

    `name` is that of the stored matrix, with its file.
    """
    try:
        yield
    except RuntimeError:
        raise CheckpointError(
            f"{name} is quantised, and changed as it is loaded in another way than by its rows "
            "and inputs: that is not implemented"
        ) from None


def places(change: Change, count: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Return which of `count` stored rows or columns each of the decoder's is; -1: zeros.

    Raises RuntimeError if the change does more than to move these.
    """
    shape = (count, 1) if dim == 0 else (1, count)
    numbers = torch.arange(1, count + 1, device=device)
    most = 2 * count + 1
    found, others = (change(each.view(shape)) for each in (numbers, most - numbers))
    if found.is_floating_point() or found.shape[1 - dim] != 1:
        raise RuntimeError("numbers are not moved alone")
    if not torch.equal(others, torch.where(found == 0, 0, most - found)):
        raise RuntimeError("numbers are changed")
    return found.flatten() - 1


def with_rows(matrix: QuantMatrix, sources: Tensor) -> QuantMatrix:
    """Return rows `sources` of a matrix; -1 is a row of zeros."""
    found = {name: getattr(matrix, name) for name in BY_ROW}
    picked: dict[str, Any] = {
        name: None if each is None else _picked(each, sources) for name, each in found.items()
    }
    if bool((sources < 0).any()):
        for name in ("scales", "minimums"):
            if picked[name] is not None:
                as_bytes(picked[name])[sources < 0] = 0
    return replace(matrix, **picked)


def with_columns(matrix: QuantMatrix, sources: Tensor) -> QuantMatrix:
    """Return a matrix in which input i is the stored `sources[i]`; -1: one that counts nothing.

    Codes of the latter lie behind all others, in groups whose scales are zero, or, in a group that
    ends behind them, as the number zero.
    """
    matrix = multiplied(matrix)
    stored, count = matrix.inputs, len(sources)
    if matrix.kind is Kind.F4 or matrix.minimums is not None:  # no code of these stands for zero
        matrix = in_groups(matrix, math.gcd(min(matrix.group, stored), stored))
        group = matrix.group
    else:
        group = max(matrix.group, count) if matrix.group >= stored else matrix.group
    more = -(-count // group) - matrix.scales.shape[1]
    names = ("scales", "zeros", "minimums")
    found = {name: getattr(matrix, name) for name in names}
    padded: dict[str, Any] = {
        name: None if each is None else with_zeros(each, more) for name, each in found.items()
    }
    codes = with_zeros(codes_of(matrix), count - stored)
    if matrix.kind is Kind.W4:
        codes[:, stored:] = MIDDLE
    if matrix.zeros is not None:
        as_bytes(codes)[:, stored:] = as_bytes(matrix.zeros)[:, -1:]
    if matrix.kind in (Kind.W4, Kind.F4):
        codes = halves(codes)
    kept = torch.arange(count, device=sources.device)
    there = torch.empty(stored, dtype=torch.long, device=sources.device)
    there[sources[sources >= 0]] = kept[sources >= 0]
    order = there if matrix.order is None else there[matrix.order]
    factors = matrix.factors
    if factors is not None:
        factors = factors[sources.clamp_min(0)]
        factors[sources < 0] = 1.0
    whole = torch.cat([order, kept[sources < 0]])
    padded |= {"codes": codes, "order": whole, "factors": factors}
    return replace(matrix, **padded, group=group, inputs=count)


def _picked(x: Tensor, sources: Tensor) -> Tensor:
    """Return rows of a tensor of any dtype."""
    return as_bytes(x)[sources.clamp_min(0)].view(x.dtype)
