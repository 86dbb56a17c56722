"""Slopes of ALiBi (Press et al., 2022) for each head, in the two ways of models. No torch."""

import struct
from math import ceil, floor, log2


def slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes that most models have.

    Of a power of two, n heads have `2 ** (-8 i / n)`; what heads there are beyond one have the odd
    powers of the next.
    """
    known = 1 << floor(log2(num_heads))
    first = [2 ** (-8 * i / known) for i in range(1, known + 1)]
    rest = [2 ** (-4 * i / known) for i in range(1, 2 * (num_heads - known), 2)]
    return (*first, *rest)


def slopes_from(num_heads: int, most: float) -> tuple[float, ...]:
    """Return slopes from `2 ** -(most / n)` down to `2 ** -most`.

    Where heads are no power of two, every second of the next one's comes first.
    """
    padded = 1 << ceil(log2(num_heads))
    every = [2 ** (-most * i / padded) for i in range(1, padded + 1)]
    if padded != num_heads:
        every = every[1::2] + every[::2]
    return tuple(every[:num_heads])


def bfloat16(value: float) -> float:
    """Return the nearest number that bfloat16 has; the even one of two."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (result,) = struct.unpack("<f", struct.pack("<I", rounded))
    return float(result)
