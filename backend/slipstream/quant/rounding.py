"""Round weights of 16 or 32 bits to integers or e4m3 as they are loaded, without data.

A range that leaves out the largest weights of a group can have less error than one that holds all:
the best of some ranges is taken, by the sum of cubes of errors. Squares (Lin et al., 2024) favour
ranges that cut off more, which costs outputs more where a few inputs are far larger than others.
Numbers of e4m3 are a grid whose steps double, so a scale up to twice as large moves weights within
it, and none is cut off: squares choose the best of those, as in `slipstream quantize`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.quant.matrix import E4M3, Kind, QuantMatrix, RowType, halves

GROUP = 64  # inputs of a group of 4 bits
GROUP_FOR_E4M3 = 128  # without zeros
_RANGES = torch.linspace(1.0, 0.5, 21).tolist()  # parts of a group's whole range
_E4M3_MAX = 448.0
E4M3_STEPS = (
    8  # scales of e4m3 that are tried, from the one that holds the largest weight to twice it
)
_LEAST = 1e-30  # what counts as a range, so that zeros stay zeros
# Weights that are rounded at a time: on a GPU as much as fp32 may need beside the result, on a CPU
# what stays in its caches while all ranges are tried.
_WEIGHTS, _CPU_WEIGHTS = 1 << 22, 1 << 18


class _Rounded(NamedTuple):
    """Groups: codes `[n, groups, group]`, the others `[n, groups, 1]`."""

    codes: Tensor
    scale: Tensor
    zero: Tensor


def rounded8(weight: Tensor, row_type: RowType = "") -> QuantMatrix:
    """Return `[n, k]` in 8 bits, a scale for each output: its largest weight over 127.

    `row_type` is what rows are to be rounded to.
    """
    n, k = weight.shape
    if weight.is_meta:  # whose operations are slow
        codes, scales = weight.new_empty(n, k, dtype=torch.int8), weight.new_empty(n, 1)
        return QuantMatrix(Kind.W8, codes, scales, k, k, row_type=row_type)
    parts = [_rows8(part.float(), weight.dtype) for part in _some(weight)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return QuantMatrix(Kind.W8, codes, scales, k, k, row_type=row_type)


def rounded4(weight: Tensor, group: int = GROUP) -> QuantMatrix:
    """Return `[n, k]` in 4 bits with zeros, by groups; the last may be shorter."""
    n, k = weight.shape
    if weight.is_meta:
        scales = weight.new_empty(n, -(-k // group))
        codes = weight.new_empty(n, -(-k // 2), dtype=torch.uint8)
        zeros = torch.empty_like(scales, dtype=torch.uint8)
        return QuantMatrix(Kind.W4, codes, scales, group, k, zeros=zeros)
    parts = [_rows4(part.float(), group, weight.dtype) for part in _some(weight)]
    codes = torch.cat([halves(part.codes.flatten(1)[:, :k]) for part in parts])
    scales = torch.cat([part.scale.squeeze(-1) for part in parts])
    zeros = torch.cat([part.zero.squeeze(-1) for part in parts]).to(torch.uint8)
    return QuantMatrix(Kind.W4, codes, scales, group, k, zeros=zeros)


def rounded_for_e4m3(weight: Tensor, group: int = GROUP_FOR_E4M3) -> QuantMatrix:
    """Return `[n, k]` in 4 bits without zeros, for rows in e4m3; the last group may be shorter."""
    n, k = weight.shape
    if weight.is_meta:
        scales = weight.new_empty(n, -(-k // group))
        codes = weight.new_empty(n, -(-k // 2), dtype=torch.uint8)
        return QuantMatrix(Kind.W4, codes, scales, group, k, row_type="e4m3")
    parts = [_rows4(part.float(), group, weight.dtype, has_zeros=False) for part in _some(weight)]
    codes = torch.cat([halves(part.codes.flatten(1)[:, :k]) for part in parts])
    scales = torch.cat([part.scale.squeeze(-1) for part in parts])
    return QuantMatrix(Kind.W4, codes, scales, group, k, row_type="e4m3")


def rounded_e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[n, k]` in e4m3 and its scales `[n]` fp32, for each output the best of eight."""
    n, k = weight.shape
    if weight.is_meta:
        return weight.new_empty(n, k, dtype=E4M3), weight.new_empty(n, dtype=torch.float32)
    parts = [_rows_e4m3(part.float()) for part in _some(weight)]
    values, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return values.view(E4M3), scales.squeeze(-1)


def _some(weight: Tensor) -> tuple[Tensor, ...]:
    at_once = _CPU_WEIGHTS if weight.device.type == "cpu" else _WEIGHTS
    return torch.split(weight, max(1, at_once // weight.shape[1]))


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a scale to the model's dtype, before weights are rounded to it; none is zero."""
    kept = scale.clamp_min(_LEAST).to(dtype)
    return torch.where(kept == 0, torch.finfo(dtype).tiny, kept)


def _rows8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = _stored(weight.abs().amax(1, keepdim=True) / 127, dtype)
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return codes.to(torch.int8), scales


def _rows_e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes of e4m3 `[n, k]`, and scales `[n, 1]` fp32."""
    largest = weight.abs().amax(1, keepdim=True).clamp_min(_LEAST)
    best: tuple[Tensor, ...] = ()  # errors, scales
    for step in range(E4M3_STEPS):
        scale = largest * (2 ** (step / E4M3_STEPS) / _E4M3_MAX)
        off = _values(weight, scale).float().mul_(scale).sub_(weight)
        best = _better((off.square_().sum(-1, keepdim=True), scale), best)
    scale = best[1]
    return _values(weight, scale).view(torch.uint8), scale


def _values(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp_(-_E4M3_MAX, _E4M3_MAX).to(E4M3)


def _better(found: tuple[Tensor, ...], best: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return, row by row, what has less error, the first of each; of equal ones the best so far.

    Codes are none of it: those of each range would be many.
    """
    if not best:
        return found
    is_better = found[0] < best[0]
    both = zip(found, best, strict=True)
    return tuple(torch.where(is_better, new, old) for new, old in both)


def _rows4(weight: Tensor, group: int, dtype: torch.dtype, has_zeros: bool = True) -> _Rounded:
    n, k = weight.shape
    grouped = torch.nn.functional.pad(weight, (0, -k % group)).view(n, -1, group)
    low, high = (each.unsqueeze(-1) for each in torch.aminmax(grouped, dim=-1))
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if not has_zeros:  # 8 steps below zero, 7 above
        high = torch.maximum(-low / 8, high / 7) * 7
        low = high * (-8 / 7)
    best: tuple[Tensor, ...] = ()  # errors, scales, zeros
    for part in _RANGES:
        scale = _stored((high - low) * part / 15, dtype)
        step = scale.float()
        zero = (-low * part / step).round().clamp(0, 15) if has_zeros else torch.full_like(low, 8)
        size = _codes4(grouped, step, zero).sub_(zero).mul_(step).sub_(grouped).abs_()
        cubes = (size * size).mul_(size).sum(-1, keepdim=True)
        best = _better((cubes, scale, zero), best)
    _, scale, zero = best
    return _Rounded(_codes4(grouped, scale.float(), zero), scale, zero)


def _codes4(grouped: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    return (grouped / step).round_().add_(zero).clamp_(0, 15)
