"""Outputs of all experts of a few rows, added to the residual sum in one launch."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import E4M3
from slipstream.kernels.experts.combine import Shared, combine, shared_arguments
from slipstream.kernels.experts.grouped import SKINNY_ROWS, ExpertMatrix, check, down
from slipstream.kernels.experts.kind import DTYPES
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

MAX_ROWS = SKINNY_ROWS
_OUTPUTS = 16  # of a CTA
_MAX_PARTS = 256  # of sums of pairs, in shared memory
_CHUNK_BYTES = 128  # of a weight row, that a warp reads at once
_CHUNKS_OF_START = 3  # that a warp could read while its first ones are on their way
_WARPS = (16, 8)  # of a CTA that has a multiprocessor alone, or is one of two


@op("x[p,k]:T, values[e,m,k]:W, residual[n,m]:T")
def down_add(
    x: Tensor,
    values: Tensor,
    residual: Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    shared: Shared | None = None,
) -> Tensor:
    """Compute `combine(residual, down(x, ...), ...)`, in fp32 throughout; return `residual`.

    On a GPU the kernel reads the choice before it waits for x. So the kernel that makes x must wait
    for that which makes the choice, and only then let this one start, as `skinny.cu` does.

    Args:
        x: what `gate_up` returned, by places.
        values: `matrix.values`.
        residual: changed in place.
        matrix: weights of each expert.
        routed: of at most MAX_ROWS rows, in tiles of SKINNY_ROWS.
        shared: as of `combine`.
    """
    products = down.oracle(x.float(), values, matrix, routed)
    return combine.oracle(residual, products, shared)


def takes(routed: Routed, matrix: ExpertMatrix, device: torch.device) -> bool:
    """Whether the kernel is the one for a choice and weights, on a device.

    It never is in deterministic mode, which has larger tiles, nor for packed weights.
    """
    is_taken = refusal(len(routed.experts), routed.tile_rows, matrix) is None
    return device.type != "cpu" and is_taken


def refusal(num_rows: int, tile_rows: int, matrix: ExpertMatrix) -> str | None:
    """Say why the kernel is not that of so many rows on a GPU; None: it is."""
    if matrix.groups is not None:
        return "takes weights that are not packed"
    if not 0 < num_rows <= MAX_ROWS:
        return f"takes 1 to {MAX_ROWS} rows"
    return None if tile_rows == SKINNY_ROWS else f"takes tiles of {SKINNY_ROWS} rows"


def _variant(dtype: torch.dtype, is_fp8: bool, warps: int) -> jit.Variant:
    return jit.variant("experts/down_add.cu", dtype, FP8=int(is_fp8), GATED=0, WARPS=warps)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for each in product(DTYPES, (False, True), _WARPS):
        yield _variant(*each)


def warps_of_tile(num_tiles: int, num_pairs: int, num_chunks: int, warps: int) -> int:
    """Choose how many of a CTA's warps share out a tile, by the chunks that a warp waits for."""
    allowed = [
        n for n in (1, 2, 4, 8, 16) if n <= warps and (n == 1 or num_pairs * n <= _MAX_PARTS)
    ]

    def cost(split: int) -> int:
        rounds, chunks = -(-num_tiles * split // warps), -(-num_chunks // split)
        return rounds * (chunks + _CHUNKS_OF_START)

    return min(allowed, key=cost)


@down_add.cuda
def _down_add(
    x: Tensor,
    values: Tensor,
    residual: Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    shared: Shared | None = None,
) -> Tensor:
    num_rows, outputs = residual.shape
    width, is_fp8 = x.shape[1], values.dtype == E4M3
    check("down_add", x, values, outputs)
    jit.require(residual.stride(1) == 1, "down_add: rows must be contiguous")
    is_whole = shared is None or shared.values.is_contiguous()
    jit.require(is_whole, "down_add: shared must be contiguous")
    jit.require(routed.tile_rows == SKINNY_ROWS, "down_add: tiles of {}", routed.tile_rows)
    jit.require(0 < num_rows <= MAX_ROWS, "down_add: {} rows", num_rows)
    num_ctas, num_tiles = -(-outputs // _OUTPUTS), len(routed.tiles)
    warps = _WARPS[num_ctas > jit.num_multiprocessors(x.get_device())]
    num_chunks = -(-width * values.itemsize // _CHUNK_BYTES)
    split = warps_of_tile(num_tiles, len(routed.order), num_chunks, warps)
    places = (routed.order, routed.weights, routed.tiles)
    jit.launch(
        _variant(x.dtype, is_fp8, warps),
        "down_add",
        (num_ctas,),
        32 * warps,
        *(x, x.stride(0), values, matrix.scales, matrix.bias, *places),
        *(residual, width, outputs, routed.top_k, 0),
        *(num_tiles, num_rows, split, residual.stride(0)),
        *shared_arguments(shared),
        overlaps=True,
    )
    return residual
