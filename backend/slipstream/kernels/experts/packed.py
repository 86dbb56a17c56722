"""GEMMs of experts whose weights stay in 4 or 8 bits, on any GPU.

Prompts take the same kernel by its largest tiles: to unpack a layer would write and read four times
the bytes, which at 2,048 rows takes as long as the GEMMs, and gigabytes of memory.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.kernels.experts.kind import GATES, gate_macros
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.gemm.packed import DTYPES, all_packings, block_bytes, defines
from slipstream.kernels.gemm.packing import BLOCK, TILE, Groups, Packing
from slipstream.kernels.runtime import jit

# The most pairs an expert, on average, for each size of tiles. Reckoned, not measured: most experts
# have one tile, which weights are read for once. Sums of groups leave no registers for tiles of 64.
MOST_PAIRS = {8: 4.0, 16: 10.0, 32: math.inf}
MOST_E2M1_PAIRS = {**MOST_PAIRS, 32: 22.0, 64: math.inf}
_SPLITS = {8: 4}  # warps that share out the inputs, by rows of a tile; else one
_WARPS, _TILES = 4, 2  # of a CTA; of weight rows, that a warp has at once
_X_PITCH = BLOCK * 2 + 16  # bytes of a row of x in a slot
# Of a ring: four CTAs a multiprocessor, three, or two, and one of any GPU.
_SLOTS_BYTES = {8: 55 << 10, 16: 75 << 10}
_MOST_SLOTS_BYTES = 96 << 10
_MOST_SLOTS = 4


def tile_rows(packing: Packing) -> tuple[int, ...]:
    """Return the rows that tiles may have."""
    return (*(MOST_E2M1_PAIRS if packing.scales_numbers else MOST_PAIRS),)


def _split(rows: int) -> int:
    return _SPLITS.get(rows, 1)


def slot_bytes(packing: Packing, rows: int) -> int:
    """Count the bytes of a slot: blocks of a CTA's tiles of weights, and rows of x beside them."""
    return _split(rows) * rows * _X_PITCH + _WARPS * _TILES * block_bytes(packing)


def num_slots(packing: Packing, rows: int) -> int:
    """Count the slots of a ring, each of blocks of weights and the inputs beside them."""
    most = _SLOTS_BYTES.get(rows, _MOST_SLOTS_BYTES)
    return max(2, min(_MOST_SLOTS, most // slot_bytes(packing, rows)))


def variant(
    dtype: torch.dtype, packing: Packing, is_gated: bool, is_adapted: bool, rows: int
) -> jit.Variant:
    """Return the kernel for tiles of so many rows."""
    return jit.variant(
        "experts/packed.cu",
        dtype,
        **gate_macros(is_gated, is_adapted),
        **defines(packing),
        ROWS=rows,
        SPLIT=_split(rows),
        SLOTS=num_slots(packing, rows),
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in DTYPES:
        for packing, gates in itertools.product(all_packings(dtype), GATES):
            for rows in tile_rows(packing):
                yield variant(dtype, packing, *gates, rows)


def check(name: str, x: Tensor, packing: Packing, streams: int) -> None:
    """Raise `KernelError` unless the kernel multiplies rows `x` by packed weights of experts."""
    require, width = jit.require, x.shape[1]
    require(x.dtype in DTYPES, "{}: experts have kernels for 16 bits, not {}", name, x.dtype)
    is_here = packing.layout == "fragments" and not packing.for_e4m3
    require(is_here, "{}: weights are {}", name, packing)
    fits = not packing.scales_numbers or packing.scale == x.dtype
    require(fits, "{}: scales of e2m1 are {}", name, packing.scale)
    require(width == packing.inputs, "{}: {} inputs, not {}", name, width, packing.inputs)
    require(width % 8 == 0, "{}: width {} is not a multiple of 8", name, width)
    whole = packing.outputs % (TILE * streams) == 0
    require(whole, "{}: {} rows of weights are no whole tiles", name, packing.outputs)
    require(jit.vector_width(width, x) == 16 // x.itemsize, "{}: rows are not aligned", name)


def launch(
    name: str,
    x: Tensor,
    groups: Groups,
    routed: Routed,
    streams: int,
    parameters: Sequence[jit.Argument],
    is_adapted: bool = False,
) -> None:
    """Start the kernel for tiles of `routed.tile_rows`.

    Args:
        name: of the op.
        x: its rows.
        groups: of the weights of all experts.
        routed: as of the op.
        streams: 2 for gates and ups, else 1.
        parameters: of all kernels of experts (task.cuh).
        is_adapted: whether what adapters add is among them.
    """
    packing, rows = groups.packing, routed.tile_rows
    check(name, x, packing, streams)
    sizes = tile_rows(packing)
    jit.require(rows in sizes, "{}: {} have no tiles of {}", name, packing, rows)
    how = x.dtype, packing, streams > 1, is_adapted
    jit.compile_too(variant(*how, each) for each in sizes)
    units = -(-packing.tiles // _TILES)
    jit.launch(
        variant(*how, rows),
        "packed",
        (-(-units * _split(rows) // _WARPS), len(routed.tiles)),
        32 * _WARPS,
        *parameters,
        groups.scales,
        groups.zeros,
        packing.groups,
        packing.group_factor,
        shared_memory=num_slots(packing, rows) * slot_bytes(packing, rows),
        overlaps=True,
    )
