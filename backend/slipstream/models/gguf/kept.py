"""Keep the blocks of GGUF's types of 3 to 8 bits as scales and codes, by 32 inputs or 16.

Values are `code * scale` or `code * scale + minimum`, as `blocks.py` has them to the last bit.
Codes of 4 bits stay so, those of 3, 5 and 6 bits, and numbers of IQ4's table, have a byte each.
Scales stay fp16 where they are in the file as they multiply; those of K types and of IQ4_XS stay
whole numbers of units, which are fp16. MXFP4 is e2m1 with powers of two, in fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.blocks import (
    fives,
    nibbles,
    powers,
    scales_and_leasts,
    scales_of_uneven,
    sixes,
    threes,
    uneven,
)
from slipstream.models.gguf.restore import rows_in_order
from slipstream.models.gguf.types import QUANTISED
from slipstream.quant.matrix import Kind, QuantMatrix, halves


class Parts(NamedTuple):
    """Blocks apart."""

    codes: Tensor  # [n, elements]
    scales: Tensor  # [n, groups]
    minimums: Tensor | None = None  # [n, groups]
    units: Tensor | None = None  # [n, 1], of scales
    low_units: Tensor | None = None  # [n, 1], of minimums


def kept(entry: TensorEntry, blocks: Tensor) -> QuantMatrix:
    """Return a matrix of a type in `KEPT`, rows in the order of a Hugging Face checkpoint.

    Args:
        entry: the matrix.
        blocks: its bytes, u8.
    """
    kind, (rows, inputs) = QUANTISED[entry.dtype], entry.shape
    parts = _PARTS[entry.dtype](rows_in_order(entry, blocks).reshape(-1, kind.num_bytes))
    count = parts.scales.shape[1]

    def by_group(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.expand(-1, count).reshape(rows, -1)

    codes, scales = parts.codes.reshape(rows, inputs), parts.scales.reshape(rows, -1)
    if entry.dtype == "MXFP4":
        return QuantMatrix(Kind.F4, halves(codes), scales, kind.elements // count, inputs)
    is_whole = codes.dtype == torch.int8
    has_zeros = not is_whole and parts.minimums is not None
    return QuantMatrix(
        Kind.W8 if is_whole else Kind.W4,
        codes if is_whole else halves(codes),
        scales,
        kind.elements // count,
        inputs,
        zeros=torch.zeros_like(scales, dtype=torch.uint8) if has_zeros else None,
        minimums=by_group(parts.minimums),
        units=by_group(parts.units),
        low_units=by_group(parts.low_units),
    )


def _fp16(b: Tensor, first: int) -> Tensor:
    return b[:, first : first + 2].contiguous().view(torch.float16)


def _q4_0(b: Tensor) -> Parts:
    return Parts(nibbles(b[:, 2:], 16), _fp16(b, 0))


def _q4_1(b: Tensor) -> Parts:
    return Parts(nibbles(b[:, 4:], 16), _fp16(b, 0), _fp16(b, 2))


def _q5_0(b: Tensor) -> Parts:
    return Parts(fives(b[:, 2:6], b[:, 6:]).view(torch.int8) - 16, _fp16(b, 0))


def _q5_1(b: Tensor) -> Parts:
    return Parts(fives(b[:, 4:8], b[:, 8:]).view(torch.int8), _fp16(b, 0), _fp16(b, 2))


def _q8_0(b: Tensor) -> Parts:
    return Parts(b[:, 2:].contiguous().view(torch.int8), _fp16(b, 0))


def _scaled(b: Tensor, codes: Tensor) -> Parts:
    scales, leasts = scales_and_leasts(b[:, 4:16])
    return Parts(codes, scales, leasts, _fp16(b, 0), -_fp16(b, 2))


def _q3_k(b: Tensor) -> Parts:
    codes, scales = threes(b)
    return Parts(codes, scales, units=_fp16(b, 108))


def _q4_k(b: Tensor) -> Parts:
    return _scaled(b, nibbles(b[:, 16:], 32))


def _q5_k(b: Tensor) -> Parts:
    return _scaled(b, fives(b[:, 16:48], b[:, 48:], 32).view(torch.int8))


def _q6_k(b: Tensor) -> Parts:
    scales = b[:, 192:208].contiguous().view(torch.int8)
    return Parts(sixes(b).view(torch.int8) - 32, scales, units=_fp16(b, 208))


def _mxfp4(b: Tensor) -> Parts:
    return Parts(nibbles(b[:, 1:], 16), powers(b))


def _iq4_nl(b: Tensor) -> Parts:
    return Parts(uneven(b[:, 2:]), _fp16(b, 0))


def _iq4_xs(b: Tensor) -> Parts:
    """Give each scale to two groups of 16, as Q3_K and Q6_K have them."""
    scales = scales_of_uneven(b).repeat_interleave(2, 1)
    return Parts(uneven(b[:, 8:]), scales, units=_fp16(b, 0))


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
KEPT = tuple(_PARTS)
