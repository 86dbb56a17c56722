"""GEMMs with packed weights of 4 or 8 bits, of up to 16 rows, as fast as the weights can be read.

One lane of a CTA streams codes through a ring in shared memory by bulk copies, another one rows of
x; sixteen warps share out the inputs and multiply by mma.sync (sm_90a). Two warps more make the
terms of adapters, if rows have such.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gemm import packed_routes, records
from slipstream.kernels.gemm.op import (
    MOST_ADAPTED_ROWS,
    PLAIN,
    Around,
    Spec,
    TermTable,
    adapted_gemm,
    gemm,
)
from slipstream.kernels.gemm.packed import DTYPES, all_packings, defines, shared_refusal
from slipstream.kernels.gemm.packing import BLOCK, TILE, Packing, arranged
from slipstream.kernels.gemm.sm90 import packed_terms
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import Implementation

MAX_ROWS, MOST_RECORDED_ROWS = 16, 8
RECORDS = ("", "pair", "shared", "halves")
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


def tiles_of(packing: Packing, columns: int) -> tuple[int, ...]:
    """Return how many tiles a CTA may have at a time: as many as registers hold sums of."""
    if packing.record and packing.bits == 8 and packing.record in records.HAS_MINIMUMS:
        return TILES[columns][:2]
    return TILES[columns]


def slot_bytes(packing: Packing) -> int:
    """Bytes of a piece of a tile: codes of a block for each warp, scales and zeros."""
    codes = BLOCK * TILE * packing.bits // 8
    part = TILE * (packing.scale_bytes + int(packing.has_zeros))
    return WARPS * (codes + packing.parts * part)


def _slots(packing: Packing, rows: int, places: int, x_slots: int) -> int:
    left = MEMORY - places - 16 - x_slots * (rows * _X_PITCH + _BARRIER_BYTES)
    return min(_MOST_SLOTS, left // (slot_bytes(packing) + _BARRIER_BYTES))


@functools.cache
def tiling(
    num_rows: int, packing: Packing, gated: bool, multiprocessors: int, has_terms: bool = False
) -> Tiling | None:
    """Give every multiprocessor as many tiles as the next; None where memory is too small.

    The order of a sum depends on the matrix, and on whether there are more than 8 rows.
    """
    columns = next(c for c in TILES if num_rows <= c)
    a_unit = 2 if gated else 1
    share = -(-(packing.tiles // a_unit) // multiprocessors)
    sizes = tiles_of(packing, columns)
    passes = -(-share * a_unit // sizes[-1])
    wanted = -(-share // passes) * a_unit
    tiles = next(t for t in sizes if t >= wanted and t % a_unit == 0)
    places = WARPS // 2 * tiles * columns * _ROW_PITCH
    kept = packed_terms.BYTES if has_terms else 0
    if has_terms:
        places += packed_terms.num_bytes(num_rows, share * a_unit * TILE)
    pieces = -(-packing.blocks // WARPS)
    all_of_x = _slots(packing, num_rows, places + kept, pieces)
    if passes > 1 and all_of_x >= _ENOUGH_SLOTS:
        x_slots = pieces
    else:
        fit = (n for n in (3, 2) if _slots(packing, num_rows, places + kept, n) > n)
        x_slots = min(pieces, next(fit, 2))
    slots = _slots(packing, num_rows, places + kept, x_slots)
    if slots < _FEWEST_SLOTS:
        return None
    size = slots * slot_bytes(packing) + x_slots * num_rows * _X_PITCH + places
    size += (slots + x_slots) * _BARRIER_BYTES + 16
    return Tiling(columns, tiles, share, slots, x_slots, max(size, ALONE))


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a GEMM; None: it is."""
    if (why := shared_refusal(spec, MAX_ROWS) or _record_refusal(spec)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    sms = spec.target.multiprocessors
    if tiling(spec.rows, spec.packing, bool(spec.gate), sms) is None:
        return "finds no room in shared memory"
    return None


def _record_refusal(spec: Spec) -> str | None:
    """Say why records keep the kernel from a GEMM, whose sums they leave too few registers."""
    record = "" if spec.packing is None else spec.packing.record
    if record not in RECORDS:
        return "takes records of one word"
    if record and spec.rows > MOST_RECORDED_ROWS:
        return f"takes {MOST_RECORDED_ROWS} rows beside records"
    return None


def adapts(spec: Spec) -> str | None:
    """Say why the kernel does not take terms of adapters beside a GEMM; None: it does."""
    if (why := packed_terms.refusal(spec) or _record_refusal(spec)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    sms = spec.target.multiprocessors
    if tiling(spec.rows, spec.packing, bool(spec.gate), sms, has_terms=True) is None:
        return "finds no room in shared memory for terms of adapters"
    return None


def _variant(
    dtype: torch.dtype, packing: Packing, columns: int, tiles: int, has_terms: bool = False
) -> jit.Variant:
    return jit.variant(
        "gemm/sm90/packed_stream.cu",
        dtype,
        **defines(packing),
        COLUMNS=columns,
        TILES=tiles,
        **({"ADAPTS": 1} if has_terms else {}),
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    kinds = ((dtype, packing) for dtype in DTYPES for packing in all_packings(dtype))
    for (dtype, packing), columns in itertools.product(kinds, TILES):
        if packing.record not in RECORDS or (packing.record and columns > MOST_RECORDED_ROWS):
            continue
        for tiles in tiles_of(packing, columns):
            yield _variant(dtype, packing, columns, tiles)
            if columns == MOST_ADAPTED_ROWS:
                yield _variant(dtype, packing, columns, tiles, has_terms=True)


@gemm.implementation(
    "packed_stream", "cuda", "sm_90a", takes=takes, cost=packed_routes.cost("packed_stream")
)
def packed_stream(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with bias, gate and residual sum."""
    return _multiply(x, weight, around)


def adapted(x: Tensor, weight: Tensor, around: Around, terms: TermTable) -> Tensor:
    """`gemm` with terms of adapters added before gate and residual, in one kernel (`adapts`)."""
    return _multiply(x, weight, around, terms)


adapted_gemm.add(
    Implementation(
        "packed_stream", adapted, "cuda", "sm_90a", adapts, packed_routes.cost("packed_stream")
    )
)


def _multiply(
    plain_x: Tensor, weight: Tensor, around: Around, terms: TermTable | None = None
) -> Tensor:
    groups, y = around.groups, around.residual
    assert groups is not None, "weights are packed"
    packing, gated = groups.packing, bool(around.gate)
    x = arranged(plain_x, groups)
    if y is None:
        outputs = packing.outputs // (2 if gated else 1)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    jit.require(y.stride(1) == 1, "packed_stream: rows of the residual must be contiguous")
    multiprocessors = jit.num_multiprocessors(x.get_device())
    tiles = tiling(len(x), packing, gated, multiprocessors, terms is not None)
    jit.require(tiles is not None, "packed_stream: no room in shared memory for {}", packing)
    assert tiles is not None
    jit.launch(
        _variant(x.dtype, packing, tiles.columns, tiles.tiles, terms is not None),
        "packed_stream",
        (-(-(packing.tiles // (2 if gated else 1)) // tiles.share),),
        32 * (WARPS + 2) + (0 if terms is None else packed_terms.THREADS),
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
        tiles.slots,
        tiles.x_slots,
        int(gated),
        int(around.residual is not None),
        *(packed_terms.behind(plain_x, terms) if terms is not None else ()),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
    return y
