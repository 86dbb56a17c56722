"""GEMMs with packed weights of 4 or 8 bits, of up to 128 rows, on Hopper's tensor cores (sm_90a).

Weights are decoded into registers, from which wgmma takes them; rows of x come through shared
memory, for two warpgroups at once. CTAs share out the inputs of a matrix that is too small for all
multiprocessors; a second kernel then adds up their sums, always in the same order.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gemm import packed_routes
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.gemm.packed import DTYPES, block_bytes, defines, packings, shared_refusal
from slipstream.kernels.gemm.packing import TILE, Packing, arranged
from slipstream.kernels.runtime import jit, tensor_map

MAX_ROWS = 128
COLUMNS = (16, 32, 64, 128)  # rows of x that a launch takes
MEMORY = 226 << 10
_GROUPS, _WARPS = 2, 8  # of a CTA
_X_SLOTS = {16: 6, 32: 6, 64: 4, 128: 4}
_MOST_SLOTS = {1: 10, 2: 5}  # of a warp's ring, by tiles
_MOST_SHARES = 16
_BARRIER_BYTES = 16  # of a slot
# What a multiprocessor does in a cycle, about: bytes from memory, and from the L2 cache. A tile of
# 64 rows takes a warp so many cycles to decode; a launch has so many beside its blocks, and where
# sums are added up by another kernel, so many more.
_MEMORY, _CACHE, _DECODE, _LAUNCH, _SUM = 15, 40, 170, 3000, 4000


@dataclass(frozen=True, slots=True)
class Tiling:
    """Division of a GEMM: `2 * tiles` tiles of 64 weight rows a CTA, `shares` CTAs for them."""

    columns: int
    tiles: int
    shares: int

    @property
    def rows(self) -> int:
        """Count the rows of the weights of a CTA."""
        return _GROUPS * self.tiles * 64


def num_slots(packing: Packing, columns: int, tiles: int) -> int:
    """Count the slots of a warp's ring."""
    x_bytes = _X_SLOTS[columns] * (columns * 256 + _BARRIER_BYTES)
    fit = (MEMORY - x_bytes) // (_WARPS * tiles * block_bytes(packing))
    return int(min(fit, _MOST_SLOTS[tiles]))


def num_bytes(packing: Packing, tiling: Tiling) -> int:
    """Bytes of shared memory: rings of x and of codes, and later sums in their place."""
    columns, tiles = tiling.columns, tiling.tiles
    x_bytes = _X_SLOTS[columns] * (columns * 256 + _BARRIER_BYTES)
    codes = _WARPS * num_slots(packing, columns, tiles) * tiles * block_bytes(packing)
    return max(x_bytes + codes, columns * (tiling.rows + 4) * 4)


def _cycles(packing: Packing, tiling: Tiling, multiprocessors: int) -> float:
    """Estimate how long it takes; only which of several takes less matters."""
    columns, tiles = tiling.columns, -(-packing.outputs // tiling.rows)
    waves = -(-tiles * tiling.shares // multiprocessors)
    codes, x = tiling.rows * 16 * packing.bits, columns * 256
    multiplied = tiling.rows // 64 * max(4 * columns, _DECODE)
    a_block = max(codes / _MEMORY, (codes + x) / _CACHE, multiplied)
    cycles = waves * (_LAUNCH + -(-packing.blocks // tiling.shares) * a_block)
    if tiling.shares > 1:
        moved = 8 * tiling.shares * columns * packing.outputs
        cycles += _SUM + moved / _CACHE / multiprocessors
    return float(cycles)


@functools.cache
def tiling(num_rows: int, packing: Packing, multiprocessors: int) -> Tiling:
    """Divide a GEMM; by how many rows `COLUMNS` has for it, and not by the rows themselves."""
    columns = next(c for c in COLUMNS if num_rows <= c)
    shares = range(1, min(_MOST_SHARES, packing.blocks) + 1)
    sizes = [(t, s) for t in ((1, 2) if columns < 128 else (1,)) for s in shares]
    found = [Tiling(columns, *each) for each in sizes if num_slots(packing, columns, each[0]) >= 3]
    return min(found, key=lambda each: _cycles(packing, each, multiprocessors))


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a GEMM; None: it is."""
    if (why := shared_refusal(spec, MAX_ROWS)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    return "takes scales, not records" if spec.packing.record else None


def _variant(dtype: torch.dtype, packing: Packing, columns: int, tiles: int) -> jit.Variant:
    return jit.variant(
        "gemm/sm90/packed_wgmma.cu",
        dtype,
        **defines(packing),
        COLUMNS=columns,
        TILES=tiles,
        SLOTS=num_slots(packing, columns, tiles),
        X_SLOTS=_X_SLOTS[columns],
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    kinds = ((dtype, packing) for dtype in DTYPES for packing in packings(dtype))
    for (dtype, packing), columns, tiles in itertools.product(kinds, COLUMNS, (1, 2)):
        is_built = (columns, tiles) != (128, 2) and num_slots(packing, columns, tiles) >= 3
        if is_built:
            yield _variant(dtype, packing, columns, tiles)


@gemm.implementation(
    "packed_wgmma", "cuda", "sm_90a", takes=takes, cost=packed_routes.cost("packed_wgmma")
)
def packed_wgmma(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with bias, gate and residual sum."""
    groups, y = around.groups, around.residual
    assert groups is not None, "weights are packed"
    packing, gated = groups.packing, bool(around.gate)
    x = arranged(x, groups)
    rows, width = x.shape
    outputs = packing.outputs // (2 if gated else 1)
    if y is None:
        y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    jit.require(y.stride(1) == 1, "packed_wgmma: rows of the residual must be contiguous")
    division = tiling(rows, packing, jit.num_multiprocessors(x.get_device()))
    variant = _variant(x.dtype, packing, division.columns, division.tiles)
    shares, copied = division.shares, -(-rows // 8) * 8
    size = (shares, rows, packing.tiles * TILE)
    parts = torch.empty(size, dtype=torch.float32, device=x.device) if shares > 1 else None
    ends = (shares, int(gated), int(around.residual is not None))
    jit.launch(
        variant,
        "packed_wgmma",
        (-(-packing.outputs // division.rows) * shares,),
        _WARPS * 32,
        tensor_map.boxes(x, rows, width, copied, x.stride(0)),
        weight,
        groups.scales,
        groups.zeros,
        around.columns,
        around.bias,
        y,
        parts,
        y.stride(0),
        rows,
        packing.inputs,
        packing.outputs,
        packing.tiles,
        packing.groups,
        packing.group_factor,
        *ends,
        copied,
        shared_memory=num_bytes(packing, division),
        overlaps=True,
    )
    if shares > 1:
        grid = (-(-rows * outputs // 256),)
        sizes = (y.stride(0), rows, packing.outputs, packing.tiles)
        given = (parts, around.columns, around.bias, y, *sizes, *ends)
        jit.launch(variant, "packed_sum", grid, 256, *given, overlaps=True)
    return y
