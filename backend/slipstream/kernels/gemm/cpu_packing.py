"""The order in which the processor's kernels read weights; pure torch, and its inverse.

Weights lie in tiles of 16 outputs and blocks of 32 inputs. A block of 4 bits is 8 times 32 bytes,
of four inputs each: byte `4 i + j` has input `j` of output `i` in its lower half, of output `8 + i`
in its upper one. A block of 8 bits is 16 times 32 bytes, of two inputs each: byte `2 i + j` is
input `j` of output `i`. They stand for `code * scale + minimum`,
those of e2m1 for twice their number times the scale. Numbers of 16 and 32 bits lie in
tiles, too, one input of 16 outputs after the other, and stand for themselves. Those of 32 bits may
also stay as a checkpoint has them, row by row: what is mapped is not copied then.
"""

import torch
from torch import Tensor

from slipstream.kernels.gemm.packing import TILE, CodeType, Groups, Packing, e2m1_table

BLOCK = 32
LAYOUT, ROWS = "tiles", "rows"  # of a `Packing`
MIDDLE = {4: 8, 8: 0}  # the zero where there are no minimums
FLOAT_MIDDLE = 12.0  # of what codes of e2m1 stand for: twice their number, which is whole
NUMBERS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}  # their bits


def packing_of(
    bits: int,
    group: int,
    outputs: int,
    inputs: int,
    halves: bool,
    mins: bool,
    code_type: CodeType = "integers",
) -> Packing:
    """Describe weights; a group of all inputs is one of as many blocks as they fill."""
    if group >= inputs:
        group = -(-inputs // BLOCK) * BLOCK
    scale = torch.float16 if halves else torch.float32
    return Packing(bits, group, outputs, inputs, scale, mins, code_type, layout=LAYOUT)


def packing_of_numbers(weight: Tensor) -> Packing:
    """Describe weights `[n, k]` of a type in `NUMBERS`."""
    outputs, inputs = weight.shape
    dtype = weight.dtype
    return Packing(NUMBERS[dtype], inputs, outputs, inputs, dtype, False, layout=LAYOUT)


def packing_of_rows(weight: Tensor) -> Packing:
    """Describe weights `[n, k]` of fp32 that are contiguous and stay as they lie."""
    return packing_of_numbers(weight)._replace(layout=ROWS)


def takes_group(bits: int, group: int, inputs: int) -> bool:
    """Return whether groups are whole blocks; of 8 bits, halves of such."""
    return group >= inputs or group % (BLOCK // 2 if bits == 8 else BLOCK) == 0


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put codes `[n, k]` u8 in order, `[tiles, bytes]` u8; of 8 bits they are those of i8."""
    n, k = codes.shape
    tiles, blocks = -(-n // TILE), -(-k // BLOCK)
    if codes.is_meta:
        return codes.new_empty(tiles, blocks * TILE * BLOCK * bits // 8, dtype=torch.uint8)
    padded = codes.new_zeros(tiles * TILE, blocks * BLOCK, dtype=torch.uint8)
    padded[:n, :k] = codes
    if bits == 4:
        # tile, half, output | block, four, input
        halves = padded.view(tiles, 2, 8, blocks, 8, 4).permute(0, 3, 4, 1, 2, 5)
        return (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).reshape(tiles, -1).contiguous()
    pairs = padded.view(tiles, TILE, blocks, 16, 2).permute(0, 2, 3, 1, 4)
    return pairs.reshape(tiles, -1).contiguous()


def pack_numbers(weight: Tensor) -> Tensor:
    """Put weights `[n, k]` in order, `[tiles, 16 k]` of their type."""
    n, k = weight.shape
    tiles = -(-n // TILE)
    if n % TILE:
        weight = torch.cat([weight, weight.new_zeros(tiles * TILE - n, k)])
    return weight.view(tiles, TILE, k).transpose(1, 2).reshape(tiles, -1).contiguous()


def unpack(values: Tensor, packing: Packing) -> Tensor:
    """Return codes `[n, k]` u8: the inverse of `pack`."""
    tiles, blocks = len(values), -(-packing.inputs // BLOCK)
    if packing.bits == 4:
        halves = torch.stack([values & 15, values >> 4], -1).view(tiles, blocks, 8, 8, 4, 2)
        padded = halves.permute(0, 5, 3, 1, 2, 4)
    else:
        padded = values.view(tiles, blocks, 16, TILE, 2).permute(0, 3, 1, 2, 4)
    codes = padded.reshape(tiles * TILE, blocks * BLOCK)
    return codes[: packing.outputs, : packing.inputs]


def by_tile(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Put numbers of groups, `[n, groups]`, in order: `[tiles, groups, 16]`."""
    n, groups = values.shape
    tiles = -(-n // TILE)
    padded = torch.zeros(tiles * TILE, groups, dtype=dtype, device=values.device)
    padded[:n] = values
    return padded.view(tiles, TILE, groups).transpose(1, 2).contiguous()


def by_row(values: Tensor, packing: Packing) -> Tensor:
    """Return numbers of groups for each input, `[n, k]` fp32: the inverse of `by_tile`, spread."""
    rows = values.float().transpose(1, 2).reshape(len(values) * TILE, -1)
    return rows.repeat_interleave(packing.group, 1)[: packing.outputs, : packing.inputs]


def dense(values: Tensor, groups: Groups) -> Tensor:
    """Return the weights that packed codes stand for, `[n, k]` fp32, of inputs as they lie."""
    packing = groups.packing
    if packing.layout == ROWS:
        return values
    if packing.scale == values.dtype:
        tiles = values.view(len(values), packing.inputs, TILE).transpose(1, 2)
        return tiles.reshape(-1, packing.inputs)[: packing.outputs].float()
    codes = unpack(values, packing)
    if packing.code_type == "e2m1":
        return 2 * e2m1_table(values.device)[codes.long()] * by_row(groups.scales, packing)
    numbers = (codes.view(torch.int8) if packing.bits == 8 else codes).float()
    scales = by_row(groups.scales, packing)
    if groups.minimums is None:
        return (numbers - MIDDLE[packing.bits]) * scales
    return numbers * scales + by_row(groups.minimums, packing)


def rows(values: Tensor, groups: Groups, ids: Tensor) -> Tensor:
    """Return rows `ids [n] i64` of what codes in tiles stand for, `[n, k]` fp32; see `dense`."""
    tiles, minimums = ids // TILE, groups.minimums
    own = groups.packing._replace(outputs=len(ids) * TILE)
    scales = groups.scales[tiles] if groups.scales.numel() else groups.scales  # numbers have none
    some = Groups(own, scales, minimums=None if minimums is None else minimums[tiles])
    found = dense(values[tiles], some)
    return found[torch.arange(len(ids), device=ids.device) * TILE + ids % TILE]
