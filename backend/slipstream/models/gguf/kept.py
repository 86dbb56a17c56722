"""Keep the blocks of GGUF's types of 4 to 8 bits as scales and codes, by 32 inputs or 16.

Values are `code * scale` or `code * scale + minimum`, as `blocks.py` has them to the last bit.
Codes of 4 bits stay so, those of 5 and 6 bits have a byte each. Scales stay fp16 where they are in
the file as they multiply; those of K types come of two numbers, in fp32. MXFP4 is e2m1 with powers
of two, in fp32, too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.blocks import fives, half, nibbles, powers, scales_and_leasts, sixes
from slipstream.models.gguf.restore import rows_in_order
from slipstream.models.gguf.types import QUANTISED
from slipstream.quant.matrix import Kind, QuantMatrix, halves

# Codes of blocks, `[n, elements]`; their scales and minimums, `[n, groups]` each.
Parts = tuple[Tensor, Tensor, Tensor | None]


def kept(entry: TensorEntry, blocks: Tensor) -> QuantMatrix:
    """Return a matrix of a type in `KEPT`, rows in the order of a Hugging Face checkpoint.

    Args:
        entry: the matrix.
        blocks: its bytes, u8.
    """
    kind, (rows, inputs) = QUANTISED[entry.dtype], entry.shape
    codes, scales, minimums = _PARTS[entry.dtype](
        rows_in_order(entry, blocks).reshape(-1, kind.num_bytes)
    )
    group = kind.elements // scales.shape[1]
    codes, scales = codes.reshape(rows, inputs), scales.reshape(rows, -1)
    if minimums is not None:
        minimums = minimums.reshape(rows, -1)
    if entry.dtype == "MXFP4":
        return QuantMatrix(Kind.F4, halves(codes), scales, group, inputs)
    if codes.dtype == torch.int8:
        return QuantMatrix(Kind.W8, codes, scales, group, inputs, None, minimums)
    zeros = None if minimums is None else torch.zeros_like(scales, dtype=torch.uint8)
    return QuantMatrix(Kind.W4, halves(codes), scales, group, inputs, zeros, minimums)


def _fp16(b: Tensor, first: int) -> Tensor:
    return b[:, first : first + 2].contiguous().view(torch.float16)


def _q4_0(b: Tensor) -> Parts:
    return nibbles(b[:, 2:], 16), _fp16(b, 0), None


def _q4_1(b: Tensor) -> Parts:
    return nibbles(b[:, 4:], 16), _fp16(b, 0), _fp16(b, 2)


def _q5_0(b: Tensor) -> Parts:
    return fives(b[:, 2:6], b[:, 6:]).view(torch.int8) - 16, _fp16(b, 0), None


def _q5_1(b: Tensor) -> Parts:
    return fives(b[:, 4:8], b[:, 8:]).view(torch.int8), _fp16(b, 0), _fp16(b, 2)


def _q8_0(b: Tensor) -> Parts:
    return b[:, 2:].contiguous().view(torch.int8), _fp16(b, 0), None


def _scaled(b: Tensor, codes: Tensor) -> Parts:
    scales, leasts = scales_and_leasts(b[:, 4:16])
    return codes, half(b, 0) * scales, -half(b, 2) * leasts


def _q4_k(b: Tensor) -> Parts:
    return _scaled(b, nibbles(b[:, 16:], 32))


def _q5_k(b: Tensor) -> Parts:
    return _scaled(b, fives(b[:, 16:48], b[:, 48:], 32).view(torch.int8))


def _q6_k(b: Tensor) -> Parts:
    scales = half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return sixes(b).view(torch.int8) - 32, scales, None


def _mxfp4(b: Tensor) -> Parts:
    return nibbles(b[:, 1:], 16), powers(b), None


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
KEPT = tuple(_PARTS)
