"""GEMMs with weights of 4 or 8 bits that stay so in memory: few rows, on any GPU.

Codes become 16-bit numbers in registers, each difference of code and zero exactly; sums of a group
are scaled in fp32. So the product is that of the weights which the checkpoint stands for, rounded
once. The order of a sum depends on the GPU and the matrix, and on whether there are more than 8 and
more than 16 rows.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gemm import packed_routes, records
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.gemm.packing import BLOCK, TILE, Packing, arranged
from slipstream.kernels.runtime import jit

DTYPES = (torch.float16, torch.bfloat16)
SCALES = (torch.float32, torch.float16, torch.bfloat16)
# By bits: those of GGUF's Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, and of several types under one another.
RECORDS = ((4, "pair"), (4, "shared"), (8, "pair"), (8, "shared"), (8, "halves"), (8, "wide"))
MAX_ROWS = 128
COLUMNS = (8, 16, 32)  # rows of x that a launch takes
TILES = (1, 2, 3, 4, 6, 8)
_MOST_TILES = {8: 8, 16: 4, 32: 4}  # at a time: what registers hold
_MOST_WITH_MINIMUMS = _MOST_TILES | {32: 3}  # beside sums of inputs
_WARPS = {8: (16, 8), 16: (8, 4), 32: (8, 4)}  # the first of which has room
_FEWEST_SLOTS, _MOST_SLOTS = 2, 6
_ROW_PITCH, _X_PITCH = 20 * 4, BLOCK * 2 + 16  # bytes: of 16 sums, of a row of x in a slot
MEMORY = {"sm_80": 163 << 10, "sm_87": 163 << 10, "sm_90a": 226 << 10, "sm_100a": 226 << 10}
_LEAST_MEMORY = 99 << 10  # of a CTA of any GPU


@dataclass(frozen=True, slots=True)
class Tiling:
    """Division of a product: each CTA has `share` tiles, or pairs of them, `tiles` at a time."""

    columns: int
    warps: int
    tiles: int
    share: int
    slots: int
    bytes: int  # of shared memory


def block_bytes(packing: Packing) -> int:
    """Bytes of a block in a slot, with its scales and zeros."""
    part = TILE * (packing.scale_bytes + int(packing.has_zeros))
    return BLOCK * TILE * packing.bits // 8 + packing.parts * part


def _bytes(packing: Packing, size: tuple[int, int], tiles: int, slots: int, rows: int) -> int:
    columns, warps = size
    x_slots = -(-(slots - 1) // tiles) + 1
    ring = slots * block_bytes(packing) + x_slots * rows * _X_PITCH
    return warps // 2 * tiles * columns * _ROW_PITCH + 16 + warps * ring


def _most_tiles(packing: Packing) -> dict[int, int]:
    return _MOST_WITH_MINIMUMS if packing.record in records.HAS_MINIMUMS else _MOST_TILES


@functools.cache
def tiling(
    num_rows: int, packing: Packing, gated: bool, multiprocessors: int, memory: int
) -> Tiling | None:
    """Every multiprocessor gets as many tiles as the next; None where memory is too small."""
    columns = next(c for c in COLUMNS if num_rows <= c)
    a_unit = 2 if gated else 1
    share = -(-(packing.tiles // a_unit) // multiprocessors)
    for warps in _WARPS[columns]:  # of all rows that a launch takes, not of these
        size = (columns, warps)
        if _bytes(packing, size, a_unit, _FEWEST_SLOTS, columns) <= memory:
            break
    for most in range(_most_tiles(packing)[columns], a_unit - 1, -1):
        if most not in TILES or most % a_unit:
            continue
        passes = -(-share * a_unit // most)
        wanted = -(-share // passes) * a_unit
        tiles = next(t for t in TILES if t >= wanted and t % a_unit == 0)
        for slots in range(_MOST_SLOTS, _FEWEST_SLOTS - 1, -1):
            num_bytes = _bytes(packing, size, tiles, slots, num_rows)
            if num_bytes <= memory:
                return Tiling(*size, tiles, share, slots, num_bytes)
    return None


def type_refusal(spec: Spec) -> str | None:
    """Say why no kernel takes packed weights beside rows of this type; None: one may."""
    if spec.packing is None:
        return "takes packed weights"
    if spec.packing.for_e4m3:
        return "takes codes for rows of 16 bits"
    if spec.x not in DTYPES or spec.out != spec.x:
        return "takes rows of fp16 or bf16"
    if spec.packing.scales_numbers and spec.packing.scale != spec.x:
        return "takes e2m1 whose scales are of the type of the rows"
    return "has no norm" if spec.norm else None


def shared_refusal(spec: Spec, max_rows: int) -> str | None:
    """Say why no kernel takes packed weights as they are, beside so many rows; None: one may."""
    if (why := type_refusal(spec)) is not None:
        return why
    if not 1 <= spec.rows <= max_rows:
        return f"takes 1 to {max_rows} rows"
    return shape_refusal(spec, 8)


def shape_refusal(spec: Spec, piece: int) -> str | None:
    """Say why no kernel takes packed weights of such a shape or place; None: one may.

    Args:
        spec: of the GEMM.
        piece: inputs in 16 bytes of x.
    """
    if spec.gate not in ("", "silu"):
        return "gates by SiLU alone"
    if spec.gate and spec.outputs % (2 * TILE):
        return f"gates multiples of {2 * TILE} outputs"
    if spec.inputs % piece:
        return f"takes multiples of {piece} inputs"
    if not (spec.x_aligned and spec.x_pitch and spec.weight_aligned):
        return "takes what is aligned to 16 bytes"
    return None


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a product; None: it is."""
    if (why := shared_refusal(spec, MAX_ROWS)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    memory = MEMORY.get(spec.target.architecture, _LEAST_MEMORY)
    rows, sms = min(spec.rows, COLUMNS[-1]), spec.target.multiprocessors
    if tiling(rows, spec.packing, bool(spec.gate), sms, memory) is None:
        return "finds no room in shared memory"
    return None


def defines(packing: Packing) -> dict[str, int | str]:
    """Return the macros of `codes.cuh`."""
    return {
        "BITS": packing.bits,
        "CODE_TYPE": packing.code_type.upper(),
        "SCALE": jit.type_name(packing.scale),
        "PARTS": packing.parts,
        "ZEROS": int(packing.has_zeros),
        **({"RECORD": records.NUMBERS[packing.record]} if packing.record else {}),
    }


def _variant(dtype: torch.dtype, packing: Packing, tiles: Tiling) -> jit.Variant:
    return jit.variant(
        "gemm/packed.cu",
        dtype,
        **defines(packing),
        COLUMNS=tiles.columns,
        TILES=tiles.tiles,
        WARPS=tiles.warps,
        SLOTS=tiles.slots,
    )


def packings(dtype: torch.dtype) -> Iterator[Packing]:
    """Yield a packing of every kind without records, for rows of a dtype."""
    for bits, group, scale, zeros in itertools.product((4, 8), (32, 64, 128), SCALES, (0, 1)):
        yield Packing(bits, group, 4096, 4096, scale, bool(zeros))
    for group, scale in itertools.product((32, 64, 128), SCALES):
        yield Packing(8, group, 4096, 4096, scale, False, "e4m3")
    for group in (16, 32):
        yield Packing(4, group, 4096, 4096, dtype, False, "e2m1")


def all_packings(dtype: torch.dtype) -> Iterator[Packing]:
    """Yield a packing of every kind, for rows of a dtype."""
    yield from packings(dtype)
    for bits, record in RECORDS:
        yield Packing(bits, records.INPUTS, 4096, 4096, torch.float16, False, record=record)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    kinds = ((dtype, packing) for dtype in DTYPES for packing in all_packings(dtype))
    for (dtype, packing), columns in itertools.product(kinds, COLUMNS):
        fitting = (t for t in TILES if t <= _most_tiles(packing)[columns])
        for tiles, warps in itertools.product(fitting, _WARPS[columns]):
            yield _variant(dtype, packing, Tiling(columns, warps, tiles, 1, 4, 0))


@gemm.implementation("packed", "cuda", takes=takes, cost=packed_routes.cost("packed"))
def packed(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with bias, gate and residual sum; some rows at a time."""
    return _multiply(x, weight, around)


def _multiply(x: Tensor, weight: Tensor, around: Around) -> Tensor:
    assert around.groups is not None, "weights are packed"
    packing = around.groups.packing
    x = arranged(x, around.groups)
    y = around.residual
    if y is None:
        outputs = packing.outputs // (2 if around.gate else 1)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    jit.require(y.stride(1) == 1, "packed: elements of a row of the residual must be contiguous")
    for first in range(0, len(x), COLUMNS[-1]):
        part = slice(first, first + COLUMNS[-1])
        _launch(x[part], weight, around, y[part])
    return y


def _launch(x: Tensor, weight: Tensor, around: Around, y: Tensor) -> None:
    groups = around.groups
    assert groups is not None, "weights are packed"
    packing, gated = groups.packing, bool(around.gate)
    multiprocessors = jit.num_multiprocessors(x.get_device())
    memory = min(jit.shared_memory_limit(x.get_device()), MEMORY["sm_90a"])
    tiles = tiling(len(x), packing, gated, multiprocessors, memory)
    jit.require(tiles is not None, "packed: no room in shared memory for {}", packing)
    assert tiles is not None
    jit.launch(
        _variant(x.dtype, packing, tiles),
        "packed",
        (-(-(packing.tiles // (2 if gated else 1)) // tiles.share),),
        tiles.warps * 32,
        weight,
        groups.scales,
        groups.zeros,
        around.columns,
        x,
        around.bias,
        y,
        x.stride(0),
        y.stride(0),
        len(x),
        packing.inputs,
        packing.outputs,
        packing.tiles,
        packing.groups,
        packing.group_factor,
        tiles.share,
        int(gated),
        int(around.residual is not None),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
