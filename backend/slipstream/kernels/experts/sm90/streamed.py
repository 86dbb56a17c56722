"""GEMMs of experts in e4m3 by tiles of places that are e4m3, too, on Hopper (sm_90a).

Places are rounded once, each by a scale of its own, as rows of all other GEMMs in e4m3 are; then
tensor cores multiply what memory brings, and nothing is in its way. Weights of a checkpoint that
keeps rows in 16 bits come packed (`quant/forms.py`), and none of them comes here.
"""

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import gather_quantize, quantize
from slipstream.kernels.experts.kind import KINDS, Kind
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.runtime import jit, tensor_map
from slipstream.kernels.runtime.registry import Target

ARCHITECTURE = "sm_90a"
TILE_ROWS = (16, 32, 48, 64, 128)
# The most pairs an expert, on average, for each size of tiles: reckoned. Rows that a tile lacks
# cost little up to 64, so a tile has room for experts that are chosen twice as often and more.
MOST_PAIRS = {16: 4, 32: 12, 48: 20, 64: 36, 128: 1 << 31}
_WEIGHT_ROWS = 256  # of a unit
_THREADS = 288
_COLUMN = 128  # bytes of a row in a slot
_BARRIER_BYTES = 16
_PLACE_BYTES = 2 * 12  # of a tile's row, in two halves: where it goes, and its factors
_MEMORY = 226 << 10


def refusal(target: Target, deterministic: bool, is_fp8: bool) -> str | None:
    """Say why this kernel multiplies no tiles of experts on a device; None: it does all."""
    if not is_fp8:
        return "takes weights in e4m3"
    if target.architecture != ARCHITECTURE:
        return f"needs {ARCHITECTURE}"
    if deterministic:
        return "adds in an order of its own"
    return None


def num_slots(rows: int) -> int:
    """Count the slots of the ring, each of 128 bytes of weight rows and of places."""
    return (_MEMORY - rows * _PLACE_BYTES) // (_slot_bytes(rows) + _BARRIER_BYTES)


def _slot_bytes(rows: int) -> int:
    return (rows + _WEIGHT_ROWS) * _COLUMN


def variant(kind: Kind, rows: int) -> jit.Variant:
    """Return the kernel for tiles of so many rows, whose weights are in e4m3."""
    return kind.variant("experts/sm90/streamed.cu", ROWS=rows, SLOTS=num_slots(rows))


def variants() -> Iterator[jit.Variant]:
    """Return every legal instantiation."""
    kinds = [kind for kind in KINDS if kind.is_fp8]
    return itertools.starmap(variant, itertools.product(kinds, TILE_ROWS))


def launch(
    wanted: jit.Variant,
    x: Tensor,
    values: Tensor,
    routed: Routed,
    streams: int,
    outputs: int,
    parameters: Sequence[jit.Argument],
) -> None:
    """Round places to e4m3, and start the kernel.

    Args:
        wanted: the variant, for tiles of `routed.tile_rows`.
        x: rows, if there are gates, else places.
        values: weights of experts in e4m3 `[e, streams * outputs, k]`.
        routed: rows and experts of places.
        streams: 2 of gates and ups, 1 of outputs.
        outputs: of a row.
        parameters: of all kernels of experts (task.cuh).
    """
    is_gated, rows = streams == 2, routed.tile_rows
    places = gather_quantize(x, routed.order, routed.top_k) if is_gated else quantize(x)
    columns, num_tiles = _WEIGHT_ROWS // streams, len(routed.tiles)
    num_units = -(-outputs // columns) * num_tiles
    jit.launch(
        wanted,
        "streamed",
        (min(num_units, jit.num_multiprocessors(x.get_device())),),
        _THREADS,
        tensor_map.expert_rows(values, streams, columns),
        tensor_map.boxes(places.values, len(places.values), x.shape[1], rows),
        places.scales,
        num_tiles,
        *parameters,
        shared_memory=num_slots(rows) * (_slot_bytes(rows) + _BARRIER_BYTES),
        overlaps=True,
    )
