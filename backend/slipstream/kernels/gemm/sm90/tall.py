"""Tall GEMMs: gated, of some 200 rows and more, on Hopper's tensor cores (sm_90a); a tile a CTA.

GEMMs of so many rows are bound by power. With 256 rows cuBLASLt's tiles of usual size leave a third
of the multiprocessors idle in their second wave; with thousands it is as fast, but its gate is a
kernel of its own, which reads and writes as much as the product does.

Of int8 what has no gate is multiplied here, too, where tiles fill the multiprocessors: cuBLASLt
leaves 4 bytes an output to a kernel that scales it. `tall_tiles.py` has tiles that fill them with
129 rows and more.
"""

import functools
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
    OUTPUTS,
    kind_of,
    kinds,
    shared_refusal,
)
from slipstream.kernels.gemm.sm90.tall_tiles import TallTiling, fastest, tilings
from slipstream.kernels.runtime import jit, tensor_map

MIN_ROWS = dict.fromkeys(DTYPES, 193) | {E4M3: 177, INT8: 177}  # cuBLASLt is faster with fewer
X_ROWS = 256  # of a tile
# Of what multiprocessors could multiply meanwhile, the least that is of a product of several such
# tiles; with less of it cuBLASLt is faster.
MIN_SHARE = 0.9
# Of int8: gated, by what cuBLASLt's way writes and reads more (reckoned); and without a gate, where
# an H200 made 460 to 880e12 operations a second by cuBLASLt and 1,070 to 1,550e12 here, by a full
# wave (o and down of an 8B, 832 to 8,192 rows).
_INT8_SHARE, _UNGATED_SHARE = 0.72, 0.55
TILE_ROWS = range(176, 225, 16)  # in narrower ones shared memory is the bound
# Whether GEMMs of int8 of more than 128 rows come by the tiles of `tall_tiles.py`, gated or not
# (`benchmarks/int8_tilings.py` compares them). They have not run on a GPU yet.
tiles_int8 = False


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


@functools.cache
def rows_for(num_rows: int, num_weight_rows: int, multiprocessors: int, is_ungated: bool) -> int:
    """Count the weight rows of a tile: without a gate those that waste the least."""
    if not is_ungated:
        return tile_rows(num_weight_rows, multiprocessors)
    return max(TILE_ROWS, key=lambda rows: share(num_rows, num_weight_rows, multiprocessors, rows))


def _is_tiled(dtype: torch.dtype) -> bool:
    return tiles_int8 and dtype == INT8


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a product, or not the fastest; None: it is."""
    is_ungated = not spec.gate and spec.x == INT8 and spec.scales == "both"
    if spec.gate != "silu" and not is_ungated:
        return "makes SiLU gates alone"
    if spec.residual and spec.gate:
        return "has no residual"
    if (why := shared_refusal(spec)) is not None:
        return why
    least = X_ROWS + 1 if is_ungated else MIN_ROWS[spec.x]
    least = MAX_ROWS + 1 if _is_tiled(spec.x) else least
    if spec.rows < least:
        return f"is slower than cuBLASLt below {least} rows"
    multiple = 8 if is_ungated else 16
    if spec.inputs * spec.x.itemsize % CHUNK_BYTES or spec.outputs % multiple:
        return f"takes rows of multiples of {CHUNK_BYTES} bytes and multiples of {multiple} outputs"
    if _is_tiled(spec.x):
        return None
    multiprocessors = spec.target.multiprocessors
    rows = rows_for(spec.rows, spec.outputs, multiprocessors, is_ungated)
    if rows not in TILE_ROWS:
        return f"takes {TILE_ROWS[0]} to {TILE_ROWS[-1]} outputs a multiprocessor"
    if spec.rows <= X_ROWS:
        return None
    if spec.x == E4M3:  # the gate has to be quantised behind either
        return f"gains nothing with more than {X_ROWS} rows of e4m3"
    fewest = MIN_SHARE if spec.x != INT8 else _UNGATED_SHARE if is_ungated else _INT8_SHARE
    if share(spec.rows, spec.outputs, multiprocessors, rows) < fewest:
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
    if _is_tiled(dtype):
        return fastest(num_rows, num_weight_rows, num_chunks, is_ungated, multiprocessors)
    return TallTiling(X_ROWS, rows_for(num_rows, num_weight_rows, multiprocessors, is_ungated))


def _variant(
    dtype: torch.dtype,
    tiles: TallTiling,
    is_ungated: bool = False,
    out: torch.dtype = torch.bfloat16,
) -> jit.Variant:
    element, kind = kind_of(dtype, out)
    sizes = {"ROWS": tiles.rows, "SLOTS": tiles.num_slots}
    more = {"UNGATED": 1} if is_ungated else {}
    more |= {"GROUPS": tiles.groups} if tiles.x_rows != X_ROWS else {}
    more |= {"CLUSTER": tiles.cluster} if tiles.cluster else {}
    return jit.variant("gemm/sm90/tall.cu", element, **kind, **sizes, **more)


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for (dtype, out), rows in itertools.product(kinds(), TILE_ROWS):
        yield _variant(dtype, TallTiling(X_ROWS, rows), out=out)
        if dtype == INT8:
            yield _variant(dtype, TallTiling(X_ROWS, rows), is_ungated=True, out=out)
    for out, is_ungated in itertools.product(OUTPUTS[INT8], (False, True)):
        for tiles in tilings(is_ungated):
            yield _variant(INT8, tiles, is_ungated, out)


@gemm.implementation("tall", "cuda", "sm_90a", takes=takes)
def tall(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with a gate; of int8 without one, too."""
    scales, is_ungated = around.scales, not around.gate
    by_row, by_column, bias = (0, 0, around.bias) if scales is None else scales
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
        _variant(x.dtype, tiles, is_ungated, y.dtype),
        "tall",
        (row_tiles * column_tiles * max(1, tiles.cluster),),
        128 * tiles.groups,
        tensor_map.eights(weight, 1, tiles.rows // 2),
        tensor_map.boxes(x, num_rows, width, copied, x.stride(0)),
        by_row,
        by_column,
        0 if bias is None else bias,
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
