"""The order in which kernels read weights of 4 or 8 bits; pure torch, and its inverse.

Codes are integers, e2m1 or e4m3. Integers have scales that multiply sums, and zeros; or records
instead, with minimums (`records.py`). e4m3, numbers of 16 bits too, have such scales and no zeros.
e2m1 have scales of 16 bits that multiply them: such a product has six bits, and is a number of 16
bits. To be one in fp16, too, it is `SHRUNK` of what it stands for, which factors of rows make up
for.

Codes lie in tiles of 16 rows of the weights and blocks of 128 inputs, in a block as the A fragments
of m16n8k16 of its eight k-steps: lane `4 g + t` has rows `g` and `g + 8`, inputs `2 t`, `2 t + 1`,
`2 t + 8` and `2 t + 9` of a step. A lane's word of 4 bits is a step; the first four nibbles are the
first numbers of the four registers, the others their second ones. e2m1 has the digits and the signs
of four apart (`_apart`). Of 8 bits two words are a step, two registers each: first numbers, second
numbers.

Codes of 4 bits for rows of e4m3 (`for_e4m3`) lie as the A fragments of m64n8k32 of four k-steps: a
lane's word is half a step, its inputs `4 t` to `4 t + 3` of row `g`, then of row `g + 8`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.gemm import records

TILE, BLOCK = 16, 128  # rows of the weights, inputs
CodeType = Literal["integers", "e2m1", "e4m3"]
MIDDLE = {4: 8, 8: 128}  # the zero of integers where there are no zeros
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHRUNK = 2.0**-8
LIFTS = {torch.bfloat16: 2.0**118, torch.float16: 2.0**6}  # scales of e2m1 are so much too large
_PARTS = (16, 32, 64, 128)  # inputs of a block's parts, which have a scale each


def e2m1_table(device: torch.device) -> Tensor:
    """Return the number of each code of e2m1, `[16]` fp32."""
    return torch.tensor((*E2M1, *(-each for each in E2M1)), device=device)


class Packing(NamedTuple):
    """All that kernels choose by."""

    bits: int  # 4 or 8
    group: int  # inputs that share a scale, of the codes as they lie
    outputs: int
    inputs: int
    scale: torch.dtype
    has_zeros: bool
    code_type: CodeType = "integers"  # e2m1 have 4 bits, e4m3 8
    for_e4m3: bool = False  # rows are e4m3; integers of 4 bits without zeros
    layout: str = "fragments"  # "tiles": as `cpu_packing.py` has it
    can_round_rows: bool = False  # codes are e4m3; many rows may be e4m3, too
    record: str = ""  # of integers: what a group has (`records.py`); "": a scale, maybe a zero

    def __str__(self) -> str:
        size = "a row" if self.group >= self.inputs else str(self.group)
        size = "16" if self.record in records.BY_HALVES else size
        size += " with minimums" if self.record in records.HAS_MINIMUMS else ""
        rows = " for e4m3" if self.for_e4m3 else ""
        name = f"{self.bits} bits" if self.code_type == "integers" else self.code_type
        return f"{name} by {size}, packed{rows}"

    @property
    def scales_numbers(self) -> bool:
        """Whether scales multiply numbers of 16 bits, exactly; else they multiply sums in fp32."""
        return self.code_type == "e2m1"

    @property
    def takes_e4m3(self) -> bool:
        """Whether there may be GEMMs with rows of e4m3."""
        return self.for_e4m3 or self.can_round_rows

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a row's group, or of its record."""
        return records.BYTES[self.record] if self.record else self.scale.itemsize

    @property
    def middle(self) -> int:
        """Return the code of 0 where there are no zeros."""
        if self.code_type != "integers" or (self.bits == 4 and self.record in records.HAS_MINIMUMS):
            return 0
        return MIDDLE[self.bits]

    @property
    def tiles(self) -> int:
        """Count the tiles."""
        return -(-self.outputs // TILE)

    @property
    def blocks(self) -> int:
        """Count the blocks of a tile."""
        return -(-self.inputs // BLOCK)

    @property
    def groups(self) -> int:
        """Count the groups of a row."""
        return -(-self.blocks * BLOCK // self.group)

    @property
    def group_factor(self) -> int:
        """By which a kernel divides the number of a part: it is in group `part * factor >> 31`."""
        return -(-(1 << 31) * BLOCK // (self.parts * self.group))

    @property
    def parts(self) -> int:
        """Count the parts of a block, of which each is in one group."""
        return next(BLOCK // part for part in reversed(_PARTS) if self.group % part == 0)


class Groups(NamedTuple):
    """What belongs to packed codes: scales and zeros of their groups, and how inputs come."""

    packing: Packing
    scales: Tensor  # [tiles, groups, 16]; of records [tiles, groups, 16, bytes] u8
    zeros: Tensor | None = None  # the same, u8
    order: Tensor | None = None  # [k] i64: code i is of input order[i]
    factors: Tensor | None = None  # [k]: inputs are multiplied by them first
    minimums: Tensor | None = None  # as scales, in tiles alone: added to code * scale

    @property
    def is_plain(self) -> bool:
        """Whether inputs are taken as they come."""
        return self.order is None and self.factors is None


def group_of(group: int, inputs: int, code_type: CodeType = "integers") -> int | None:
    """Return the inputs of a group as a packing has them, of a whole row too; None: it has none."""
    if group >= inputs:
        return -(-inputs // BLOCK) * BLOCK
    is_part = group in (_PARTS if code_type == "e2m1" else _PARTS[1:])
    return group if is_part or group % _PARTS[2] == 0 else None


def pack_e2m1(codes: Tensor) -> Tensor:
    """Put codes of e2m1, `[n, k]` u8, in order, `[tiles, blocks * words]` i32."""
    values = pack(codes, 4, 0)
    return values if values.is_meta else _apart(values)


def _apart(words: Tensor) -> Tensor:
    """Put the digits of nibble i of each half, i32, at 3 i, and its sign at 12 + (i ^ 1)."""
    out = torch.zeros_like(words)
    for i in range(4):
        out |= (words >> 4 * i & 0x70007) << 3 * i
        out |= (words >> (4 * i + 3) & 0x10001) << (12 + (i ^ 1))
    return out


def _together(words: Tensor) -> Tensor:
    """Put digits and signs into nibbles: the inverse of `_apart`."""
    out = torch.zeros_like(words)
    for i in range(4):
        out |= (words >> 3 * i & 0x70007) << 4 * i
        out |= (words >> (12 + (i ^ 1)) & 0x10001) << (4 * i + 3)
    return out


def pack(codes: Tensor, bits: int, middle: int, for_e4m3: bool = False) -> Tensor:
    """Put codes `[n, k]` u8 in order, `[tiles, blocks * words]` i32; `middle` is where none are."""
    n, k = codes.shape
    tiles, blocks = -(-n // TILE), -(-k // BLOCK)
    if codes.is_meta:  # whose operations are slow
        return codes.new_empty(tiles, blocks * TILE * BLOCK * bits // 32, dtype=torch.int32)
    shape = (tiles * TILE, blocks * BLOCK)
    padded = torch.full(shape, middle, dtype=torch.uint8, device=codes.device)
    padded[:n, :k] = codes
    # tile, register's row, g | block, step, register's inputs, t, number
    apart = padded.view(tiles, 2, 8, blocks, 8, 2, 4, 2)
    if for_e4m3:
        nibbles = padded.view(tiles, 2, 8, blocks, 2, 4, 4, 4).permute(0, 3, 4, 2, 6, 5, 1, 7)
        pairs = nibbles.reshape(tiles, -1, 2)
        order = pairs[..., 0] | pairs[..., 1] << 4
    elif bits == 4:
        nibbles = apart.view(tiles, 2, 8, blocks, 2, 4, 2, 4, 2).permute(0, 3, 4, 2, 7, 5, 8, 6, 1)
        pairs = nibbles.reshape(tiles, -1, 2)
        order = pairs[..., 0] | pairs[..., 1] << 4
    else:
        order = apart.view(tiles, 2, 8, blocks, 4, 2, 2, 4, 2).permute(0, 3, 4, 2, 7, 5, 6, 8, 1)
    return order.reshape(tiles, -1).contiguous().view(torch.int32)


def unpack(values: Tensor, packing: Packing) -> Tensor:
    """Return codes `[n, k]` u8: the inverse of `pack`, or of `pack_e2m1`."""
    tiles, blocks = packing.tiles, packing.blocks
    if packing.code_type == "e2m1":
        values = _together(values)
    order = values.contiguous().view(torch.uint8)
    if packing.bits == 4:
        nibbles = torch.stack([order & 15, order >> 4], -1)
        if packing.for_e4m3:
            lanes = nibbles.view(tiles, blocks, 2, 8, 4, 4, 2, 4)
            apart = lanes.permute(0, 6, 3, 1, 2, 5, 4, 7)
            codes = apart.reshape(tiles * TILE, blocks * BLOCK)
            return codes[: packing.outputs, : packing.inputs]
        lanes = nibbles.view(tiles, blocks, 2, 8, 4, 4, 2, 2, 2)
        apart = lanes.permute(0, 8, 3, 1, 2, 5, 7, 4, 6)
    else:
        apart = order.view(tiles, blocks, 4, 8, 4, 2, 2, 2, 2).permute(0, 8, 3, 1, 2, 5, 6, 4, 7)
    codes = apart.reshape(tiles * TILE, blocks * BLOCK)
    return codes[: packing.outputs, : packing.inputs]


def scales_with_nan(scales: Tensor, codes: Tensor, group: int) -> Tensor:
    """Return scales `[n, groups]` of e4m3 codes `[n, k]` u8, NaN where a group has a NaN.

    Kernels decode NaN as a number; as an output is a sum over all groups of its row, it is NaN
    either way.
    """
    if codes.is_meta or not bool((is_nan := codes & 0x7F == 0x7F).any()):
        return scales
    count = scales.shape[1]
    group = group if count > 1 else codes.shape[1]
    padded = functional.pad(is_nan, (0, count * group - codes.shape[1]))
    return scales.masked_fill(padded.view(len(codes), count, group).any(-1), float("nan"))


def by_tile(values: Tensor, packing: Packing, fill: int) -> Tensor:
    """Put numbers of groups, `[n, groups]`, in order: `[tiles, groups, 16]`."""
    if values.is_meta:
        return values.new_empty(packing.tiles, packing.groups, TILE)
    shape = (packing.tiles * TILE, packing.groups)
    padded = torch.full(shape, fill, dtype=values.dtype, device=values.device)
    padded[: len(values), : values.shape[1]] = values
    return padded.view(packing.tiles, TILE, -1).transpose(1, 2).contiguous()


def records_by_tile(values: Tensor, packing: Packing) -> Tensor:
    """Put records, `[n, groups, bytes]` u8, in order: `[tiles, groups, 16, bytes]`."""
    size = values.shape[2]
    if values.is_meta:
        return values.new_empty(packing.tiles, packing.groups, TILE, size)
    padded = values.new_zeros(packing.tiles * TILE, packing.groups, size)
    padded[: len(values)] = values
    return padded.view(packing.tiles, TILE, -1, size).transpose(1, 2).contiguous()


def by_row(values: Tensor, packing: Packing) -> Tensor:
    """Return numbers of groups for each input, `[n, k]`: the inverse of `by_tile`, spread."""
    rows = values.transpose(1, 2).reshape(packing.tiles * TILE, -1)
    return rows.repeat_interleave(packing.group, 1)[: packing.outputs, : packing.inputs]


def dense(values: Tensor, groups: Groups) -> Tensor:
    """Return the weights that packed codes stand for, `[n, k]` fp32, of inputs as they lie; factors
    of rows are left out.
    """
    packing = groups.packing
    if packing.code_type == "e4m3":
        numbers = unpack(values, packing).view(torch.float8_e4m3fn).float()
        return numbers * by_row(groups.scales, packing).float()
    if packing.code_type == "e2m1":
        table = e2m1_table(values.device)
        scales = by_row(groups.scales, packing).float() / LIFTS[packing.scale] * SHRUNK
        return table[unpack(values, packing).long()] * scales
    codes = unpack(values, packing).float()
    if packing.record:
        return _recorded(codes - packing.middle, groups)
    zeros = packing.middle if groups.zeros is None else by_row(groups.zeros, packing).float()
    return (codes - zeros) * by_row(groups.scales, packing).float()


def _recorded(codes: Tensor, groups: Groups) -> Tensor:
    """Return `code * scale + minimum`, `[n, k]`, with what records have."""
    packing = groups.packing
    by_rows = groups.scales.transpose(1, 2).reshape(packing.tiles * TILE, packing.groups, -1)
    scales, minimums = records.read(packing.record, by_rows[: packing.outputs])

    def spread(numbers: Tensor) -> Tensor:
        size = packing.groups * packing.group // numbers.shape[1]
        return numbers.repeat_interleave(size, 1)[:, : packing.inputs]

    values = codes * spread(scales)
    return values if minimums is None else values + spread(minimums)


def arranged(x: Tensor, groups: Groups) -> Tensor:
    """Return rows of inputs as the codes lie, `[n, k]` in the dtype of `x`."""
    if groups.factors is not None:
        x = (x * groups.factors).to(x.dtype)
    return x if groups.order is None else x.index_select(1, groups.order)
