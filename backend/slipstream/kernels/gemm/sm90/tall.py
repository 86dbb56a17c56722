"""Tall GEMMs: gated, of some 200 rows and more, on Hopper's tensor cores (sm_90a); a tile a CTA.

GEMMs of so many rows are bound by power. With 256 rows cuBLASLt's tiles of usual size leave a third
of the multiprocessors idle in their second wave; with thousands it is as fast, but its gate is a
kernel of its own, which reads and writes as much as the product does.

Of int8 all of 129 rows and more is multiplied here, gated or not, by tiles that fill the
multiprocessors (`tall_tiles.py`): cuBLASLt leaves 4 bytes an output to a kernel that scales it, and
half of the multiprocessors idle with a few hundred rows.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import E4M3, INT8
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.gemm.sm90.skinny import (
    CHUNK_BYTES,
    DTYPES,
    MAX_ROWS,
    kind_of,
    kinds,
    shared_refusal,
)
from slipstream.kernels.gemm.sm90.tall_tiles import TallTiling, fastest, tilings
from slipstream.kernels.runtime import jit, tensor_map

# cuBLASLt is faster with fewer, of int8 the skinny GEMM.
MIN_ROWS = dict.fromkeys(DTYPES, 193) | {E4M3: 177, INT8: MAX_ROWS + 1}
X_ROWS = 256  # of a tile
# Of what multiprocessors could multiply meanwhile, the least that is of a product of several such
# tiles; with less of it cuBLASLt is faster.
MIN_SHARE = 0.9
TILE_ROWS = range(176, 225, 16)  # in narrower ones shared memory is the bound


def tile_rows(num_weight_rows: int, multiprocessors: int) -> int:
    """Count the weight rows of a tile, one tile for each multiprocessor."""
    return -(-num_weight_rows // (multiprocessors * TILE_ROWS.step)) * TILE_ROWS.step


def share(num_rows: int, num_weight_rows: int, multiprocessors: int, rows: int) -> float:
    """Return the part of the multiprocessors' multiplications that belongs to the product, by tiles
    of so many weight rows.
    """
    tiles = -(-num_rows // X_ROWS) * -(-num_weight_rows // rows)
    room = -(-tiles // multiprocessors) * multiprocessors * X_ROWS * rows
    return num_rows * num_weight_rows / room


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a product, or not the fastest; None: it is."""
    is_ungated = not spec.gate and spec.x == INT8 and spec.scales == "both"
    if spec.gate != "silu" and not is_ungated:
        return "makes SiLU gates alone"
    if spec.residual and spec.gate:
        return "has no residual"
    if (why := shared_refusal(spec)) is not None:
        return why
    least = MIN_ROWS[spec.x]
    if spec.rows < least:
        other = "the skinny GEMM" if spec.x == INT8 else "cuBLASLt"
        return f"is slower than {other} below {least} rows"
    multiple = 8 if is_ungated else 16
    if spec.inputs * spec.x.itemsize % CHUNK_BYTES or spec.outputs % multiple:
        return f"takes rows of multiples of {CHUNK_BYTES} bytes and multiples of {multiple} outputs"
    return None if spec.x == INT8 else _refuses_tiles(spec)


def _refuses_tiles(spec: Spec) -> str | None:
    """Say why tiles of 256 rows, one for each multiprocessor, are not the fastest; None: they are.

    Sums of 16 bits and of e4m3 are rounded, so no CTAs share out the inputs of a tile.
    """
    multiprocessors = spec.target.multiprocessors
    rows = tile_rows(spec.outputs, multiprocessors)
    if rows not in TILE_ROWS:
        return f"takes {TILE_ROWS[0]} to {TILE_ROWS[-1]} outputs a multiprocessor"
    if spec.rows <= X_ROWS:
        return None
    if spec.x == E4M3:  # the gate has to be quantised behind either
        return f"gains nothing with more than {X_ROWS} rows of e4m3"
    if share(spec.rows, spec.outputs, multiprocessors, rows) < MIN_SHARE:
        return "is slower than cuBLASLt where its last wave is nearly empty"
    return None


def tiling(
    dtype: torch.dtype,
    num_rows: int,
    num_weight_rows: int,
    num_chunks: int,
    is_ungated: bool,
    multiprocessors: int,
) -> TallTiling:
    """Return the tiles of a product whose rows have so many chunks of 128 bytes."""
    if dtype == INT8:
        return fastest(num_rows, num_weight_rows, num_chunks, is_ungated, multiprocessors)
    return TallTiling(X_ROWS, tile_rows(num_weight_rows, multiprocessors))


def _variant(
    dtype: torch.dtype, tiles: TallTiling, out: torch.dtype = torch.bfloat16
) -> jit.Variant:
    element, kind = kind_of(dtype, out)
    sizes = {"ROWS": tiles.rows, "SLOTS": tiles.num_slots}
    sizes |= {"GROUPS": tiles.groups} if tiles.x_rows != X_ROWS else {}
    sizes |= {"CLUSTER": tiles.cluster} if tiles.cluster else {}
    return jit.variant("gemm/sm90/tall.cu", element, **kind, **sizes)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype, out in kinds():
        by_gate = itertools.chain(tilings(is_ungated=False), tilings(is_ungated=True))
        wide = (TallTiling(X_ROWS, rows) for rows in TILE_ROWS)
        for tiles in by_gate if dtype == INT8 else wide:
            yield _variant(dtype, tiles, out)


@gemm.implementation("tall", "cuda", "sm_90a", takes=takes)
def tall(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with a gate; of int8 without one, too."""
    scales, is_ungated = around.scales, not around.gate
    by_row, by_column, bias = (None, None, around.bias) if scales is None else scales
    num_rows, width = x.shape
    num_outputs = len(weight) // (1 if is_ungated else 2)
    y = around.residual
    if y is None:
        dtype = around.out_dtype(x)
        y = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    jit.require(
        y.stride(1) == 1 and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0,
        "tall: rows of the residual must be contiguous, and aligned to 16 bytes",
    )
    num_chunks = width * x.itemsize // CHUNK_BYTES
    multiprocessors = jit.num_multiprocessors(x.get_device())
    tiles = tiling(x.dtype, num_rows, len(weight), num_chunks, is_ungated, multiprocessors)
    copied = min(tiles.x_rows, -(-num_rows // 8) * 8)
    outputs = tiles.rows if is_ungated else tiles.rows // 2
    row_tiles, column_tiles = -(-num_rows // tiles.x_rows), -(-num_outputs // outputs)
    jit.launch(
        _variant(x.dtype, tiles, y.dtype),
        "tall",
        (row_tiles * column_tiles * max(1, tiles.cluster),),
        128 * tiles.groups,
        tensor_map.eights(weight, 1, tiles.rows // 2),
        tensor_map.boxes(x, num_rows, width, copied, x.stride(0)),
        by_row,
        by_column,
        bias,
        y,
        y.stride(0),
        num_rows,
        num_outputs,
        num_chunks,
        copied,
        row_tiles,
        column_tiles,
        int(around.residual is not None),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
    return y
