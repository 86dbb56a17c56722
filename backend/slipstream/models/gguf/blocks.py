"""Dequantise the blocks of GGUF's types, by torch, on the device where they are.

Blocks are `[n, bytes] u8`; scales in them are fp16, the arithmetic is fp32, in ggml's order, so
that values are ggml's to the last bit. Formats: ggml/src/ggml-quants.c.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.gemm.packing import e2m1_table
from slipstream.models.gguf.types import QUANTISED, BlockType

# What 4 bits stand for in IQ4_NL and IQ4_XS: closer together around 0.
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PIECE = 1 << 22  # values that are dequantised at a time: some 100 MB of intermediate tensors


def dequantise(blocks: Tensor, kind: BlockType, out: Tensor) -> None:
    """Write the values of `blocks [n, kind.num_bytes] u8` into `out`, contiguous, of any dtype."""
    flat, formula = out.view(-1), _FORMULAS[kind.name]
    step = max(_PIECE // kind.elements, 1)
    for first in range(0, len(blocks), step):
        values = formula(blocks[first : first + step])
        at = first * kind.elements
        flat[at : at + values.numel()].copy_(values.view(-1))


def half(blocks: Tensor, first: int) -> Tensor:
    """Return the fp16 at byte `first` of each block, `[n, 1] f32`."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, shifts: range, width: int, rows: int) -> Tensor:
    """Unpack fields of `width` bits: `[n, k] u8 -> [n, k / rows, len(shifts), rows]`.

    A byte holds the fields of values that are `rows` apart, the first in its lowest bits.
    """
    by = torch.tensor(list(shifts), dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return packed.reshape(len(packed), -1, 1, rows) >> by & (1 << width) - 1


def nibbles(packed: Tensor, rows: int) -> Tensor:
    """Unpack 4 bits each, `rows` apart: `[n, k] u8 -> [n, 2 k]`."""
    return _fields(packed, range(0, 8, 4), 4, rows).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return half(b, 0) * (nibbles(b[:, 2:], 16).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return half(b, 0) * nibbles(b[:, 4:], 16).float() + half(b, 2)


def powers(blocks: Tensor) -> Tensor:
    """Return the power of two of each block of MXFP4, `[n, 1]`: its exponent has a bias of 127."""
    exponents = blocks[:, :1].int() - 127
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _mxfp4(b: Tensor) -> Tensor:
    """Multiply e2m1 by a power of two, whose exponent has a bias of 127; half of it is finite."""
    table = 2 * e2m1_table(b.device)
    scale = torch.ldexp(torch.ones_like(b[:, :1], dtype=torch.float32), b[:, :1].int() - 128)
    return scale * table[nibbles(b[:, 1:], 16).long()]


def fives(bits: Tensor, packed: Tensor, rows: int = 16) -> Tensor:
    """Join low nibbles, `rows` apart, with their fifth bits: `[n, elements] u8`.

    Of blocks of 32 bit i of a u32 is of value i; of those of 256, bit i of byte j is of value
    `32 i + j`.
    """
    high = _fields(bits, range(8), 1, 1 if rows == 16 else rows).flatten(1)
    return nibbles(packed, rows) | high << 4


def _q5_0(b: Tensor) -> Tensor:
    return half(b, 0) * (fives(b[:, 2:6], b[:, 6:]).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return half(b, 0) * fives(b[:, 4:8], b[:, 8:]).float() + half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8).float() * half(b, 0)


def _q2_k(b: Tensor) -> Tensor:
    scales, packed = b[:, :16], b[:, 16:80]
    scale = (half(b, 80) * (scales & 15).float()).unsqueeze(2)
    least = (half(b, 82) * (scales >> 4).float()).unsqueeze(2)
    return scale * _fields(packed, range(0, 8, 2), 2, 32).view(-1, 16, 16).float() - least


def threes(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of Q3_K, -4 .. 3, `[n, 256]`, and scales of 16 of them, -32 .. 31, as i8."""
    high, packed, scales = b[:, :32], b[:, 32:96], b[:, 96:108]
    low_scales = nibbles(scales[:, :8], 8)
    high_scales = _fields(scales[:, 8:], range(0, 8, 2), 2, 4).flatten(1)
    low = _fields(packed, range(0, 8, 2), 2, 32).flatten(1)
    is_kept = _fields(high, range(8), 1, 32).flatten(1)
    codes = (low | is_kept << 2).view(torch.int8) - 4
    return codes, (low_scales | high_scales << 4).view(torch.int8) - 32


def _q3_k(b: Tensor) -> Tensor:
    codes, scales = threes(b)
    return (half(b, 108) * scales.float()).unsqueeze(2) * codes.view(-1, 16, 16).float()


def scales_and_leasts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 8 scales and 8 minima of 6 bits, `[n, 12] u8 -> [n, 8] u8` each."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, last & 15 | first >> 2 & 48), dim=1)
    leasts = torch.cat((second & 63, last >> 4 | second >> 2 & 48), dim=1)
    return scales, leasts


def _scaled(b: Tensor, values: Tensor) -> Tensor:
    """Scale and shift the eight sub-blocks of `values [n, 256]`, whose scales are in `b`."""
    scales, leasts = scales_and_leasts(b[:, 4:16])
    scale, least = half(b, 0) * scales.float(), half(b, 2) * leasts.float()
    return scale.unsqueeze(2) * values.view(-1, 8, 32).float() - least.unsqueeze(2)


def _q4_k(b: Tensor) -> Tensor:
    return _scaled(b, nibbles(b[:, 16:], 32))


def _q5_k(b: Tensor) -> Tensor:
    return _scaled(b, fives(b[:, 16:48], b[:, 48:], 32))


def sixes(b: Tensor) -> Tensor:
    """Join the low nibbles of Q6_K with the two bits above them: `[n, 256] u8`."""
    low = nibbles(b[:, :128], 64)
    return low | _fields(b[:, 128:192], range(0, 8, 2), 2, 32).flatten(1) << 4


def _q6_k(b: Tensor) -> Tensor:
    scale = half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return scale.unsqueeze(2) * (sixes(b).float() - 32).view(-1, 16, 16)


def uneven(packed: Tensor) -> Tensor:
    """Unpack numbers of the table of 16, `[n, k] u8 -> [n, 2 k] i8`; 32 in 16 bytes."""
    table = torch.tensor(_UNEVEN, dtype=torch.int8, device=packed.device)
    return table[nibbles(packed, 16).long()]


def scales_of_uneven(b: Tensor) -> Tensor:
    """Join scales of IQ4_XS, 4 bits and two above them, -32 .. 31: `[n, 8] i8`."""
    high = _fields(b[:, 2:4], range(0, 8, 2), 2, 1).flatten(1)
    return (nibbles(b[:, 4:8], 1) | high << 4).view(torch.int8) - 32


def _iq4_nl(b: Tensor) -> Tensor:
    return half(b, 0) * uneven(b[:, 2:]).float()


def _iq4_xs(b: Tensor) -> Tensor:
    scale = half(b, 0) * scales_of_uneven(b).float()
    return scale.unsqueeze(2) * uneven(b[:, 8:]).float().view(-1, 8, 32)


_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
assert _FORMULAS.keys() == QUANTISED.keys()
