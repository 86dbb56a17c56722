"""What packed integers have beside their codes where that is more than a scale, as GGUF's types do.

A record is of 32 inputs of a row:

    pair    scale and minimum, fp16
    shared  scale and minimum, u8; the fp16 unit of scales in every first record, that of
            minimums in every second one: two neighbours have both in common
    halves  scales of 16 inputs each, i8, and their unit, fp16
    wide    the same scales, a minimum, u8, nothing, and two units: of scales, of minimums

A weight is `code * scale + minimum`; codes of 4 bits with minimums begin at 0. A scale, or a
minimum, is a whole number times its unit, which fp32 has exactly.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

INPUTS = 32  # of a record
BYTES = {"pair": 4, "shared": 4, "halves": 4, "wide": 8}
NUMBERS = {"pair": 1, "shared": 2, "halves": 3, "wide": 4}  # RECORD of `codes.cuh`
HAS_MINIMUMS = frozenset(("pair", "shared", "wide"))
BY_HALVES = frozenset(("halves", "wide"))  # whose scales are of 16 inputs


class Numbers(NamedTuple):
    """What records are made of, by groups of 32 inputs, or of 16 (`BY_HALVES`)."""

    scales: Tensor  # [n, groups] f16 of a pair; else i8 or u8
    minimums: Tensor | None = None  # likewise; u8
    units: Tensor | None = None  # [n, groups] f16: of scales; groups 2 i and 2 i + 1 have the same
    low_units: Tensor | None = None  # [n, groups] f16: of minimums


def made(record: str, numbers: Numbers, count: int) -> Tensor:
    """Return `count` records a row, `[n, count, bytes]` u8; those behind the last are of zeros."""
    if numbers.scales.is_meta:
        shape = (len(numbers.scales), count, BYTES[record])
        return numbers.scales.new_empty(shape, dtype=torch.uint8)
    more = count * (2 if record in BY_HALVES else 1) - numbers.scales.shape[1]
    scales, minimums, units, low_units = (
        None if x is None else functional.pad(x, (0, more)) for x in numbers
    )
    assert scales is not None, "it was padded"
    if record == "pair":
        assert minimums is not None, "a pair is two"
        return torch.stack([scales, minimums], -1).view(torch.uint8)
    assert units is not None, "whole numbers have units"
    every = slice(None, None, 2)
    if record == "shared":
        assert minimums is not None, "both are in a record"
        assert low_units is not None, "both are in a record"
        parts = [scales[..., None].view(torch.uint8), minimums[..., None]]
        of_pairs = torch.stack([units[:, every], low_units[:, every]], -1)
        return torch.cat([*parts, _bytes(of_pairs.view(len(scales), -1))], -1)
    two = scales.reshape(len(scales), count, 2).view(torch.uint8)
    if record == "halves":
        return torch.cat([two, _bytes(units[:, every])], -1)
    assert minimums is not None, "wide ones have minimums"
    assert low_units is not None, "wide ones have minimums"
    least = minimums[:, every, None]
    both = [_bytes(units[:, every]), _bytes(low_units[:, every])]
    return torch.cat([two, least, torch.zeros_like(least), *both], -1)


def read(record: str, records: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scales and minimums of `[n, count, bytes]` u8: `[n, groups]`, `[n, count]` fp32.

    `count` is even where neighbours have something in common.
    """
    if record == "pair":
        numbers = _halves(records)
        return numbers[..., 0], numbers[..., 1]
    if record == "shared":
        units = _halves(records[..., 2:4])[..., 0].view(len(records), -1, 2)
        scales, minimums = (
            records[..., i].float() * units[..., i].repeat_interleave(2, 1) for i in (0, 1)
        )
        return scales, minimums
    first = 4 if record == "wide" else 2
    units = _halves(records[..., first : first + 2])
    scales = records[..., :2].contiguous().view(torch.int8).float() * units
    if record == "halves":
        return scales.flatten(1), None
    minimums = records[..., 2].float() * _halves(records[..., 6:8])[..., 0]
    return scales.flatten(1), minimums


def _bytes(halves: Tensor) -> Tensor:
    """View `[n, count]` fp16 as `[n, count, 2]` u8."""
    return halves.contiguous()[..., None].view(torch.uint8)


def _halves(values: Tensor) -> Tensor:
    """View bytes `[..., 2 k]` as `[..., k]` fp16, in fp32."""
    return values.contiguous().view(torch.float16).float()
