"""GEMMs with packed weights of 4 or 8 bits, of up to 16 rows, as fast as the weights can be read.

One lane of a CTA streams codes through a ring in shared memory by bulk copies, another one rows of
x; sixteen warps share out the inputs and multiply by mma.sync (sm_90a). Up to 8 rows may have an
RMS norm, or codes that lie as rows of e4m3 take them.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gemm import packed_routes
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.gemm.packed import (
    DTYPES,
    NORMS,
    SCALES,
    defines,
    norm_refusal,
    packings,
    shared_refusal,
)
from slipstream.kernels.gemm.packing import BLOCK, TILE, Packing, arranged
from slipstream.kernels.runtime import jit

MAX_ROWS = 16
MAX_FEW_ROWS = 8  # that may have a norm, or codes for rows of e4m3
TILES = {8: (1, 2, 3, 4), 16: (1, 2)}  # at a time, by rows of x that a launch takes
WARPS = 16  # that multiply
MEMORY = 226 << 10
ALONE = 116 << 10  # bytes of shared memory beside which no second CTA fits
_MOST_SLOTS, _FEWEST_SLOTS = 12, 2
_ENOUGH_SLOTS = 4  # of a ring beside which all of x may stay
_BARRIER_BYTES = 16  # of a slot
_X_PITCH = WARPS * BLOCK * 2 + 16  # bytes of a row of x in a slot
_ROW_PITCH = 20 * 4  # bytes of 16 sums


@dataclass(frozen=True, slots=True)
class Tiling:
    """Division of a GEMM: each CTA has `share` tiles, or pairs of them, `tiles` at a time."""

    columns: int
    tiles: int
    share: int
    slots: int  # of codes
    x_slots: int
    bytes: int  # of shared memory


def slot_bytes(packing: Packing) -> int:
    """Bytes of a piece of a tile: codes of a block for each warp, scales and zeros."""
    codes = BLOCK * TILE * packing.bits // 8
    part = TILE * (packing.scale.itemsize + int(packing.has_zeros))
    return WARPS * (codes + packing.parts * part)


def _slots(packing: Packing, rows: int, places: int, x_slots: int) -> int:
    left = MEMORY - places - 16 - x_slots * (rows * _X_PITCH + _BARRIER_BYTES)
    return min(_MOST_SLOTS, left // (slot_bytes(packing) + _BARRIER_BYTES))


@functools.cache
def tiling(
    num_rows: int, packing: Packing, gated: bool, multiprocessors: int, has_norm: bool = False
) -> Tiling | None:
    """Give every multiprocessor as many tiles as the next; None where memory is too small.

    The weight of a norm lies in the slots of x, as a row more. The order of a sum depends on the
    matrix, and on whether there are more than 8 rows.
    """
    columns = next(c for c in TILES if num_rows <= c)
    a_unit = 2 if gated else 1
    share = -(-(packing.tiles // a_unit) // multiprocessors)
    passes = -(-share * a_unit // TILES[columns][-1])
    wanted = -(-share // passes) * a_unit
    tiles = next(t for t in TILES[columns] if t >= wanted and t % a_unit == 0)
    places = WARPS // 2 * tiles * columns * _ROW_PITCH
    pieces = -(-packing.blocks // WARPS)
    rows = num_rows + has_norm
    all_of_x = _slots(packing, rows, places, pieces)
    if passes > 1 and all_of_x >= _ENOUGH_SLOTS:
        x_slots = pieces
    else:
        fit = (n for n in (3, 2) if _slots(packing, rows, places, n) > n)
        x_slots = min(pieces, next(fit, 2))
    slots = _slots(packing, rows, places, x_slots)
    if slots < _FEWEST_SLOTS:
        return None
    size = slots * slot_bytes(packing) + x_slots * rows * _X_PITCH + places
    size += (slots + x_slots) * _BARRIER_BYTES + 16
    return Tiling(columns, tiles, share, slots, x_slots, max(size, ALONE))


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a GEMM; None: it is."""
    if spec.packing is None:
        return "takes packed weights"
    by_fours = spec.packing.for_e4m3
    if by_fours and (spec.x != torch.bfloat16 or spec.inputs % 16):
        return "takes codes for rows of e4m3 beside rows of bf16, of multiples of 16 inputs"
    plain = spec._replace(norm="", packing=spec.packing._replace(for_e4m3=False))
    most = MAX_FEW_ROWS if spec.norm or by_fours else MAX_ROWS
    why = norm_refusal(spec) or shared_refusal(plain, most)
    if why is not None:
        return why
    sms = spec.target.multiprocessors
    if tiling(spec.rows, spec.packing, bool(spec.gate), sms, bool(spec.norm)) is None:
        return "finds no room in shared memory"
    return None


def _variant(
    dtype: torch.dtype, packing: Packing, columns: int, tiles: int, norm: str = ""
) -> jit.Variant:
    return jit.variant(
        "gemm/sm90/packed_stream.cu",
        dtype,
        **defines(packing),
        COLUMNS=columns,
        TILES=tiles,
        **NORMS[norm],
        **({"BY_FOURS": 1} if packing.for_e4m3 else {}),
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    kinds = ((dtype, packing) for dtype in DTYPES for packing in packings(dtype))
    for (dtype, packing), columns in itertools.product(kinds, TILES):
        for tiles in TILES[columns]:
            yield _variant(dtype, packing, columns, tiles)
            if dtype == torch.bfloat16 and columns == MAX_FEW_ROWS:
                yield from (_variant(dtype, packing, columns, tiles, n) for n in NORMS if n)
    for scale, group, tiles in itertools.product(SCALES, (32, 64, 128), TILES[MAX_FEW_ROWS]):
        made = Packing(4, group, 4096, 4096, scale, False, for_e4m3=True)
        for norm in NORMS:
            yield _variant(torch.bfloat16, made, MAX_FEW_ROWS, tiles, norm)


@gemm.implementation(
    "packed_stream", "cuda", "sm_90a", takes=takes, cost=packed_routes.cost("packed_stream")
)
def packed_stream(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with norm, bias, gate and residual sum."""
    groups, y = around.groups, around.residual
    assert groups is not None, "weights are packed"
    packing, gated = groups.packing, bool(around.gate)
    x = arranged(x, groups)
    if y is None:
        outputs = packing.outputs // (2 if gated else 1)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    jit.require(y.stride(1) == 1, "packed_stream: rows of the residual must be contiguous")
    has_norm, sms = around.norm is not None, jit.num_multiprocessors(x.get_device())
    tiles = tiling(len(x), packing, gated, sms, has_norm)
    jit.require(tiles is not None, "packed_stream: no room in shared memory for {}", packing)
    assert tiles is not None
    jit.launch(
        _variant(x.dtype, packing, tiles.columns, tiles.tiles, around.norm_kind),
        "packed_stream",
        (-(-(packing.tiles // (2 if gated else 1)) // tiles.share),),
        32 * (WARPS + 2),
        weight,
        groups.scales,
        0 if groups.zeros is None else groups.zeros,
        0 if around.columns is None else around.columns,
        x,
        0 if around.bias is None else around.bias,
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
        tiles.slots,
        tiles.x_slots,
        int(gated),
        int(around.residual is not None),
        *((around.norm, around.eps, 1.0 / packing.inputs) if around.norm is not None else ()),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
    return y
