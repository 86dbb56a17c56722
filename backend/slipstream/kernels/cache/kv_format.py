"""The numbers of the paged cache in fewer bits.

A layer's cache is a tensor `[block, kv head, K or V, token in block, row]` whose dtype is its
format. In float32, float16 and bfloat16 a row is the numbers of a token's head. Else it is bytes:

    fp8    float8_e4m3fn   the numbers over their scale; the scale
    int8   int8            the same, rounded to -127 .. 127
    int4   uint8           for each group of at most 64 numbers a scale and a zero; a number is
                           (n - zero) * scale for an n of 0 .. 15, two of them a byte, the even
                           dimension's in the low half

The bytes of a block are first the numbers of all its heads, of each K, then V, token by token, then
their scales in the same order: so numbers lie in whole lines of memory where a block's heads times
its tokens are 64 or more. A scale is a byte too, the upper bits of a float32, rounded up, with five
bits of exponent and three of mantissa: `2 ** -22 .. 832`. K is cached after its rotation, as in 16
bits. Numbers of one scale among which is NaN or infinity are NaN as a whole; beyond 1e5, in int4
1e4, they are cut off.

In fp8 a layer may have scales of its own (`Static`). Then a token's scale is 1 and its numbers are
over the layer's: a reader of the cache multiplies by that.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.runtime.op import KernelError

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
GROUP = 64  # at most, of int4
MIN_BLOCK_SIZE = 16  # of quantised blocks: smaller ones would not be whole vectors of 16 bytes
_NUMBERS = {torch.float8_e4m3fn: 1, torch.int8: 2, torch.uint8: 3}  # FORMAT in kv_format.cuh
_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_FIRST, _SHIFT, _NAN = 840, 20, 255  # upper bits of 2 ** -22; mantissa bits left out; a code
_ONE = 176  # the code of 1


class Static(NamedTuple):
    """Scales of all K and of all V of a layer, exact in fp32, 2 ** -64 .. 2 ** 64."""

    k: float
    v: float


def name_of(dtype: torch.dtype) -> str:
    """Name the format of a cache of this dtype, as `kv_cache_dtype` has it."""
    names = {kept: name for name, kept in FORMATS.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def is_quantized(cache: Tensor) -> bool:
    """Whether a cache is in fewer bits than the numbers that are computed with."""
    return cache.dtype in FORMATS.values()


def macros(dtype: torch.dtype) -> dict[str, int]:
    """Return a kernel's macros for a cache of this dtype; none if it is that of activations."""
    return {"FORMAT": _NUMBERS[dtype]} if dtype in _NUMBERS else {}


def num_groups(head_size: int) -> int:
    """Count the groups of a head in int4."""
    return -(-head_size // GROUP)


def num_scales(dtype: torch.dtype, head_size: int) -> int:
    """Bytes of scales, zeros included, in a row of a cache of this dtype."""
    return 2 * num_groups(head_size) if dtype == torch.uint8 else int(dtype in _MAX)


def row_size(dtype: torch.dtype, head_size: int) -> int:
    """Elements of a row of a cache of this dtype."""
    width = head_size // 2 if dtype == torch.uint8 else head_size
    return width + num_scales(dtype, head_size)


def head_size_of(cache: Tensor) -> int:
    """Return how many numbers a row of a cache holds."""
    row = cache.shape[-1]
    if cache.dtype == torch.uint8:
        return 2 * (row - 2 * -(-row // (GROUP // 2 + 2)))
    return row - 1 if cache.dtype in _MAX else row


def is_legal(dtype: torch.dtype, head_size: int) -> bool:
    """Whether heads of this size can be kept in this format."""
    return dtype != torch.uint8 or (head_size % 2 == 0 and head_size % num_groups(head_size) == 0)


def check_cache(op_name: str, cache: Tensor, x: Tensor, static: Static | None = None) -> None:
    """Raise `KernelError` unless a cache is for heads like `x [n, heads, d]`, and such scales."""
    if cache.dtype != x.dtype and not is_quantized(cache):
        raise KernelError(f"{op_name}: a cache of {cache.dtype} for {x.dtype}")
    if head_size_of(cache) != x.shape[2]:
        raise KernelError(f"{op_name}: rows of {cache.shape[4]} do not hold heads of {x.shape[2]}")
    if static is not None and cache.dtype != torch.float8_e4m3fn:
        raise KernelError(f"{op_name}: static scales for a cache of {cache.dtype}, not of fp8")


def _cut(x: Tensor, count: int) -> Tensor:
    """The last dimension in two, of which the first is `count`; a view."""
    return x.view(*x.shape[:-1], count, x.shape[-1] // count)


# ---- scales ----


def _codes(scales: Tensor) -> Tensor:
    """The least codes that mean at least so much; u8."""
    bits = scales.float().clamp(2.0**-22, 832.0).view(torch.int32)  # NaN stays
    codes = ((bits + (1 << _SHIFT) - 1) >> _SHIFT) - _FIRST
    return torch.where(scales.isfinite(), codes, _NAN).to(torch.uint8)


@functools.cache
def _meanings(device: torch.device) -> Tensor:
    """Return the meanings of all codes; fp32."""
    codes = torch.arange(256, dtype=torch.int32, device=device)
    values = ((codes + _FIRST) << _SHIFT).view(torch.float32).clone()
    values[_NAN] = torch.nan
    return values


def _meaning(codes: Tensor) -> Tensor:
    return _meanings(codes.device)[codes.int()]


# ---- numbers ----


def quantize(x: Tensor, dtype: torch.dtype, static: float | None = None) -> tuple[Tensor, Tensor]:
    """Heads `x [..., d]` as bytes: numbers `[..., d or d / 2]`, scales `[..., 1 or 2 groups]`.

    With `static`, of fp8, numbers are those of `x / static`, and scales 1, or NaN.
    """
    x = x.float()
    if dtype == torch.uint8:
        return _quantize_groups(x)
    codes = _codes(x.abs().amax(-1, keepdim=True) / _MAX[dtype])
    scales = _meaning(codes)
    if static is not None:
        codes = torch.where(codes == _NAN, codes, _ONE).to(torch.uint8)
        scales = torch.where(codes == _NAN, scales, static)
    scaled = (x / scales).nan_to_num(0.0)
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-_MAX[dtype], _MAX[dtype]).to(dtype).view(torch.uint8), codes


def _quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    x = _cut(x, num_groups(x.shape[-1]))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    # Wide enough for 16 steps from the lowest to the highest, and for a zero of eight bits.
    wanted = torch.maximum((high - low) / 15, torch.maximum(-low, high) / 127)
    codes = _codes(wanted)
    scales = _meaning(codes)
    zeros = (-low / scales).nan_to_num(0.0).round().clamp(-127, 127)
    n = ((x / scales).nan_to_num(0.0).round() + zeros).clamp(0, 15).to(torch.uint8).flatten(-2)
    both = torch.cat((codes, zeros.to(torch.int8).view(torch.uint8)), -1).flatten(-2)
    return n[..., ::2] | n[..., 1::2] << 4, both


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that the bytes stand for; fp32. Inverse of `quantize` up to rounding."""
    if dtype == torch.int8:
        return numbers.view(torch.int8).float().mul_(_meaning(scales))
    if dtype == torch.float8_e4m3fn:  # moved into a float16's bits, e4m3 means 1 / 256 of itself
        bits = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
        halves = bits.bitwise_and_(~0x4000).view(torch.float16)
        return halves.float().mul_(_meaning(scales) * 256)
    groups = _cut(scales, scales.shape[-1] // 2)
    wide = numbers.to(torch.int16)  # a byte's halves to two bytes
    n = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.uint8).float()
    zeros = groups[..., 1:].view(torch.int8)
    return _cut(n, groups.shape[-2]).sub_(zeros).mul_(_meaning(groups[..., :1])).flatten(-2)


# ---- the cache ----


def numbers_and_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales of whole blocks, `[..., kv head, K or V, token, bytes]` each; views.

    Raises `KernelError` for blocks in pieces, such as some of their heads: only whole ones have
    their scales where this looks for them.
    """
    shape, steps = blocks.shape[-5:], blocks.stride()[-5:]
    wanted = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(size > 1 and own != step for size, own, step in zip(shape, steps, wanted, strict=True)):
        raise KernelError(f"quantised blocks must be whole: steps are {steps}, not {(*wanted,)}")
    rows, row = blocks.shape[:-1], blocks.shape[-1]
    width = row - num_scales(blocks.dtype, head_size_of(blocks))
    flat, count = blocks.view(torch.uint8).flatten(-4), rows[-3:].numel()
    numbers, scales = torch.split(flat, [count * width, count * (row - width)], -1)
    return numbers.view(*rows, width), scales.view(*rows, row - width)


def write(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, static: Static | None = None) -> None:
    """Write K and V of tokens, `[n, kv head, d]` each, to their slots in the cache.

    Where its blocks hold one head alone, head h of block b is in block `b * heads + h`.
    """
    block, offset = slots // cache.shape[3], slots % cache.shape[3]
    heads = k.shape[1]
    if cache.shape[1] != heads:
        block = (block[:, None] * heads + torch.arange(heads, device=block.device)).flatten()
        offset = offset.repeat_interleave(heads)
        k, v = (x.reshape(-1, 1, x.shape[2]) for x in (k, v))
    if not is_quantized(cache):
        cache[block, :, 0, offset] = k
        cache[block, :, 1, offset] = v
        return
    numbers, scales = numbers_and_scales(cache)
    for part, (x, scale) in enumerate(zip((k, v), static or (None, None), strict=True)):
        for target, source in zip((numbers, scales), quantize(x, cache.dtype, scale), strict=True):
            target[block, :, part, offset] = source


def read(blocks: Tensor) -> Tensor:
    """Return the numbers of whole blocks, `[..., kv head, K or V, token, d]`: as cached, or fp32 of
    fewer bits.
    """
    return dequantize(*numbers_and_scales(blocks), blocks.dtype) if is_quantized(blocks) else blocks
