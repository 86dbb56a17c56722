"""GEMMs of experts by tiles of rows, on Hopper's tensor cores (sm_90a).

A CTA has a tile's rows and 256 weight rows of their expert, read once: twice as many as a CTA of
`tiled.cu`, whose warps each read the tile's rows from shared memory. Weights are in 16 bits, as
rows are; beside weights in e4m3 `streamed.cu` has tiles of all sizes.
"""

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from slipstream.kernels.experts.kind import KINDS, Kind
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.runtime import jit, tensor_map
from slipstream.kernels.runtime.registry import Target

ARCHITECTURE = "sm_90a"
TILE_ROWS = (32, 48, 64, 128)  # `tiled.cu` is as fast or faster by tiles of 16
# The most pairs an expert, on average, for each size of tiles. On an H200 tiles of 64 are the
# fastest with averages of 32, of 128 with one of 128; between them most experts have one tile.
MOST_PAIRS = {32: 22, 48: 35, 64: 48, 128: 1 << 31}
_WEIGHT_ROWS = 256  # of a CTA
_THREADS = 384
_COLUMN = 128  # bytes of a weight row in a slot
_BARRIER_BYTES = 16
_PLACE_BYTES = 12  # of a tile's row: where it comes from and goes to, and its factor
_MEMORY = 226 << 10


def runs_on(target: Target, deterministic: bool) -> bool:
    """Whether this kernel multiplies tiles of experts on a device.

    Deterministic mode takes `tiled.cu` for tiles of all sizes, as sums here may have another order.
    """
    return not deterministic and target.architecture == ARCHITECTURE


def num_slots(rows: int) -> int:
    """Count the slots of the ring, each of 128 bytes of weight rows and of rows."""
    return (_MEMORY - rows * _PLACE_BYTES) // (_slot_bytes(rows) + _BARRIER_BYTES)


def _slot_bytes(rows: int) -> int:
    return (rows + _WEIGHT_ROWS) * _COLUMN


def variant(kind: Kind, rows: int) -> jit.Variant:
    """Return the kernel for tiles of so many rows, whose weights are in 16 bits."""
    return kind.variant("experts/sm90/piped.cu", ROWS=rows, SLOTS=num_slots(rows))


def variants() -> Iterator[jit.Variant]:
    """Return every legal instantiation."""
    kinds = [kind for kind in KINDS if not kind.is_fp8]
    return itertools.starmap(variant, itertools.product(kinds, TILE_ROWS))


def launch(
    wanted: jit.Variant,
    values: Tensor,
    routed: Routed,
    streams: int,
    outputs: int,
    parameters: Sequence[jit.Argument],
) -> None:
    """Start the kernel.

    Args:
        wanted: the variant, for tiles of `routed.tile_rows`.
        values: weights of experts `[e, streams * outputs, k]`.
        routed: rows and experts of places.
        streams: 2 of gates and ups, 1 of outputs.
        outputs: of a row.
        parameters: of all kernels of experts (pieces.cuh).
    """
    rows, columns = routed.tile_rows, _WEIGHT_ROWS // streams
    memory = num_slots(rows) * (_slot_bytes(rows) + _BARRIER_BYTES)
    jit.launch(
        wanted,
        "piped",
        (-(-outputs // columns), len(routed.tiles)),
        _THREADS,
        tensor_map.expert_rows(values, streams, columns),
        *parameters,
        shared_memory=memory + rows * _PLACE_BYTES,
        overlaps=True,
    )
