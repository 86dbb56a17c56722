"""GEMMs with packed weights of 4 or 8 bits, of up to 256 rows, on Hopper's tensor cores (sm_90a).

Weights are decoded into registers while the tensor cores multiply those before; rows of x are the
other operand, in shared memory. CTAs share out the inputs of a matrix that is too small for all
multiprocessors; a second kernel then adds up their sums, always in the same order.

`packed_pipe` scales sums of groups in fp32. `pipe_scaled` scales each weight, and rounds it to 16
bits once, as a matrix that is dequantised; so it has sums for twice as many rows. Of e2m1, whose
scaled numbers are exact, both are one, and of records, whose minimums would need sums of x else.
`pipe_e4m3` takes rows of e4m3, any number of them, and multiplies by their scales; integers of 4
bits are exact in e4m3.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.gemm import packed_routes
from slipstream.kernels.gemm.op import (
    E4M3,
    MOST_ADAPTED_ROWS,
    PLAIN,
    Around,
    Spec,
    TermTable,
    adapted_gemm,
    gemm,
)
from slipstream.kernels.gemm.packed import (
    DTYPES,
    SCALES,
    all_packings,
    defines,
    shape_refusal,
    shared_refusal,
)
from slipstream.kernels.gemm.packing import BLOCK, TILE, Groups, Packing, arranged
from slipstream.kernels.gemm.sm90 import packed_terms
from slipstream.kernels.runtime import jit, tensor_map
from slipstream.kernels.runtime.kernel import TensorMap
from slipstream.kernels.runtime.registry import Implementation

MAX_ROWS, MAX_SCALED_ROWS, MAX_E4M3_ROWS = 128, 256, 1 << 16
# Rows of x that a launch takes, with tiles of 64 weight rows of a warpgroup.
SIZES = ((16, 1), (16, 2), (32, 1), (32, 2), (64, 1), (64, 2), (128, 1))
E4M3_SIZES = SIZES
SCALED_SIZES = ((64, 2), (128, 1), (128, 2), (256, 1))
MEMORY = 226 << 10
_GROUPS = 2  # warpgroups that multiply
_MOST_SLOTS, _FEWEST_SLOTS = 12, 2
_MOST_SHARES = 16
_BARRIER_BYTES = 16  # of a slot
# What a multiprocessor does in a cycle, about: bytes from memory, and from the L2 cache. Beside the
# GEMMs, a tile of 64 rows takes so many cycles of a block; a launch has so many beside its
# blocks, and where sums are added up by another kernel, so many more. By measurements of an H200.
_MEMORY, _CACHE, _DECODE, _LAUNCH, _SUM = 18, 33, 150, 5000, 5000


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


def slot_bytes(packing: Packing, columns: int, tiles: int) -> int:
    """Bytes of a slot: x, codes, scales and zeros of a block."""
    half = _GROUPS * tiles * 64 // 32  # tiles of 16 rows
    codes = half * BLOCK * TILE * packing.bits // 8
    scales = half * packing.parts * TILE * packing.scale_bytes
    zeros = -(-half * packing.parts * TILE // 128) * 128 if packing.has_zeros else 0
    x = columns * BLOCK * (1 if packing.for_e4m3 else 2)
    return -(-(x + 2 * (codes + scales + zeros)) // 1024) * 1024


def num_slots(packing: Packing, columns: int, tiles: int, kept: int = 0) -> int:
    """Count the slots of the ring, beside `kept` bytes of shared memory."""
    fit = (MEMORY - kept) // (slot_bytes(packing, columns, tiles) + _BARRIER_BYTES)
    return min(fit, _MOST_SLOTS)


def num_bytes(packing: Packing, division: Tiling, kept: int = 0) -> int:
    """Bytes of shared memory: the ring, and later sums in its place."""
    columns, tiles = division.columns, division.tiles
    slots = num_slots(packing, columns, tiles, kept)
    ring = slots * (slot_bytes(packing, columns, tiles) + _BARRIER_BYTES)
    return max(ring, columns * (division.rows + 4) * 4)


def _cycles(packing: Packing, division: Tiling, row_tiles: int, multiprocessors: int) -> float:
    """Estimate how long it takes; only which of several takes less matters."""
    columns, tiles = division.columns, -(-packing.outputs // division.rows)
    waves = -(-tiles * row_tiles * division.shares // multiprocessors)
    a_number = 1 if packing.for_e4m3 else 2
    codes, x = division.rows * 16 * packing.bits, columns * BLOCK * a_number
    multiplied = division.rows // 64 * (2 * columns * a_number + _DECODE)
    a_block = max((codes + x) / _CACHE, multiplied)
    cycles = waves * (_LAUNCH + -(-packing.blocks // division.shares) * a_block)
    memory = codes * tiles * packing.blocks / _MEMORY / multiprocessors
    cycles = max(cycles, _LAUNCH + memory)
    if division.shares > 1:
        moved = 8 * division.shares * columns * row_tiles * packing.outputs
        cycles += _SUM + moved / _CACHE / multiprocessors
    return float(cycles)


@functools.cache
def tiling(num_rows: int, packing: Packing, scaled: bool, multiprocessors: int) -> Tiling | None:
    """Divide a GEMM; by how many rows of `SIZES` it takes, and not by the rows themselves.

    More rows than the largest size has are as many tiles of that size.
    """
    sizes = _sizes(packing, scaled)
    columns = next((c for c, _ in sizes if num_rows <= c), sizes[-1][0])
    shares = range(1, min(_MOST_SHARES, packing.blocks) + 1)
    found = [
        Tiling(columns, tiles, share)
        for (c, tiles), share in itertools.product(sizes, shares)
        if c == columns and num_slots(packing, c, tiles) >= _FEWEST_SLOTS
    ]
    row_tiles = -(-num_rows // columns)
    cycles = functools.partial(
        _cycles, packing, row_tiles=row_tiles, multiprocessors=multiprocessors
    )
    return min(found, key=cycles, default=None)


def _scales_numbers(packing: Packing) -> bool:
    """Return whether weights are scaled for any rows: e2m1 exactly, of records rounded once."""
    return packing.scales_numbers or bool(packing.record)


def _sizes(packing: Packing, scaled: bool) -> tuple[tuple[int, int], ...]:
    if packing.for_e4m3:
        return E4M3_SIZES
    if packing.record:  # too few registers for more
        return SIZES
    if packing.scales_numbers:
        return (*SIZES, *(each for each in SCALED_SIZES if each not in SIZES))
    return SCALED_SIZES if scaled else SIZES


@functools.cache
def adapted_tiling(packing: Packing, multiprocessors: int) -> Tiling | None:
    """Divide a GEMM with terms of adapters: all CTAs run at once, and share no inputs."""
    columns = SIZES[0][0]
    for tiles in (tiles for c, tiles in SIZES if c == columns):
        division = Tiling(columns, tiles, 1)
        slots = num_slots(packing, columns, tiles, _kept(division))
        if -(-packing.outputs // division.rows) <= multiprocessors and slots >= _FEWEST_SLOTS:
            return division
    return None


def _kept(division: Tiling) -> int:
    """Count the bytes of shared memory that terms of adapters take."""
    return packed_terms.BYTES + packed_terms.num_bytes(MOST_ADAPTED_ROWS, division.rows)


def adapts(spec: Spec) -> str | None:
    """Say why the kernel does not take terms of adapters beside a GEMM; None: it does."""
    if (why := packed_terms.refusal(spec)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    if adapted_tiling(spec.packing, spec.target.multiprocessors) is None:
        return "has more CTAs than run at once, or no room in shared memory"
    return None


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a GEMM; None: it is."""
    is_scaled = spec.packing is not None and _scales_numbers(spec.packing)
    return _refusal(spec, MAX_SCALED_ROWS if is_scaled else MAX_ROWS, scaled=False)


def takes_scaled(spec: Spec) -> str | None:
    """Say why weights are not scaled; None: they are."""
    if (why := _refusal(spec, MAX_SCALED_ROWS, scaled=True)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    if _scales_numbers(spec.packing) or spec.packing.scale != spec.x:
        return "takes integers and e4m3 whose scales are of the type of the rows"
    return None if spec.rows > SIZES[0][0] else f"takes {SIZES[0][0] + 1} rows at least"


def takes_e4m3(spec: Spec) -> str | None:
    """Say why rows of e4m3 are not multiplied; None: they are."""
    packing = spec.packing
    if packing is None or not packing.for_e4m3:
        return "takes codes packed for rows of e4m3"
    if spec.x != E4M3 or spec.scales != "both" or spec.out != torch.bfloat16:
        return "takes rows of e4m3 with scales, for a model in bf16"
    if spec.rows > MAX_E4M3_ROWS:
        return f"takes at most {MAX_E4M3_ROWS} rows"
    if spec.norm or (why := shape_refusal(spec, 16)) is not None:
        return "has no norm" if spec.norm else why
    return None


def _refusal(spec: Spec, most: int, scaled: bool) -> str | None:
    if (why := shared_refusal(spec, most)) is not None:
        return why
    assert spec.packing is not None, "it was not refused"
    if tiling(spec.rows, spec.packing, scaled, spec.target.multiprocessors) is None:
        return "finds no room in shared memory"
    return None


def _variant(
    dtype: torch.dtype,
    packing: Packing,
    size: tuple[int, int],
    scaled: bool,
    has_terms: bool = False,
) -> jit.Variant:
    return jit.variant(
        "gemm/sm90/packed_pipe.cu",
        dtype,
        **defines(packing),
        COLUMNS=size[0],
        TILES=size[1],
        **({"SCALED": 1} if scaled or packing.record else {}),
        **({"FP8": 1} if packing.for_e4m3 else {}),
        **({"ADAPTS": 1} if has_terms else {}),
    )


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    kinds = ((dtype, packing) for dtype in DTYPES for packing in all_packings(dtype))
    for scale, group in itertools.product(SCALES, (32, 64, 128)):
        made = Packing(4, group, 4096, 4096, scale, False, for_e4m3=True)
        for size in E4M3_SIZES:
            yield _variant(torch.bfloat16, made, size, scaled=False)
    for (dtype, packing), scaled in itertools.product(kinds, (False, True)):
        if scaled and (_scales_numbers(packing) or packing.scale != dtype):
            continue
        for size in _sizes(packing, scaled):
            if num_slots(packing, *size) >= _FEWEST_SLOTS:
                yield _variant(dtype, packing, size, scaled)
            if not scaled and size[0] == SIZES[0][0]:
                yield _variant(dtype, packing, size, scaled, has_terms=True)


@gemm.implementation(
    "packed_pipe", "cuda", "sm_90a", takes=takes, cost=packed_routes.cost("packed_pipe")
)
def packed_pipe(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, with bias, gate and residual sum."""
    return _multiply(x, weight, around, scaled=False)


@gemm.implementation(
    "pipe_scaled", "cuda", "sm_90a", takes=takes_scaled, cost=packed_routes.cost("pipe_scaled")
)
def pipe_scaled(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`packed_pipe` with weights that are scaled, each rounded once."""
    return _multiply(x, weight, around, scaled=True)


@gemm.implementation(
    "pipe_e4m3", "cuda", "sm_90a", takes=takes_e4m3, cost=packed_routes.cost("pipe_e4m3")
)
def pipe_e4m3(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`packed_pipe` with rows of e4m3 and their scales."""
    assert around.groups is not None, "weights are packed"
    return _multiply(
        x,
        weight,
        around._replace(groups=around.groups._replace(order=None, factors=None)),
        scaled=False,
    )


def adapted(x: Tensor, weight: Tensor, around: Around, terms: TermTable) -> Tensor:
    """`gemm` with terms of adapters added before gate and residual, in one kernel (`adapts`)."""
    return _multiply(x, weight, around, scaled=False, terms=terms)


adapted_gemm.add(
    Implementation(
        "packed_pipe", adapted, "cuda", "sm_90a", adapts, packed_routes.cost("packed_pipe")
    )
)


def _multiply(
    plain_x: Tensor, weight: Tensor, around: Around, scaled: bool, terms: TermTable | None = None
) -> Tensor:
    groups, y = around.groups, around.residual
    assert groups is not None, "weights are packed"
    packing = groups.packing
    x = arranged(plain_x, groups)
    if y is None:
        outputs = packing.outputs // (2 if around.gate else 1)
        dtype = torch.bfloat16 if packing.for_e4m3 else x.dtype
        y = torch.empty((len(x), outputs), dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    jit.require(y.stride(1) == 1, "packed_pipe: rows of the residual must be contiguous")
    multiprocessors = jit.num_multiprocessors(x.get_device())
    if terms is None:
        division = tiling(len(x), packing, scaled, multiprocessors)
    else:
        division = adapted_tiling(packing, multiprocessors)
    jit.require(division is not None, "packed_pipe: no room in shared memory for {}", packing)
    assert division is not None
    behind = () if terms is None else packed_terms.behind(plain_x, terms)
    _launch(x, weight, around, y, division, scaled, behind)
    return y


def _maps(weight: Tensor, groups: Groups, tiles: int) -> tuple[TensorMap, ...]:
    """Maps of codes, scales and zeros by boxes of half a CTA's rows, of a block."""
    packing = groups.packing
    codes = BLOCK * TILE * packing.bits // 8
    part = TILE * packing.scale_bytes
    half = _GROUPS * tiles * 64 // 32
    found = [
        tensor_map.words(weight, packing.tiles, packing.blocks * codes, codes, half),
        tensor_map.words(
            groups.scales, packing.tiles, packing.groups * part, packing.parts * part, half
        ),
    ]
    if groups.zeros is None:
        return (*found, found[1])
    sizes = (packing.groups * TILE, packing.parts * TILE, half)
    return (*found, tensor_map.words(groups.zeros, packing.tiles, *sizes))


def _launch(
    x: Tensor,
    weight: Tensor,
    around: Around,
    y: Tensor,
    division: Tiling,
    scaled: bool,
    behind: tuple[Tensor | int, ...] = (),
) -> None:
    groups = around.groups
    assert groups is not None, "weights are packed"
    packing, rows, outputs = groups.packing, len(x), y.shape[1]
    size = (division.columns, division.tiles)
    variant = _variant(y.dtype, packing, size, scaled, bool(behind))
    kept = _kept(division) if behind else 0
    of_terms = packed_terms.num_bytes(rows, division.rows) if behind else 0
    shares, copied = division.shares, min(-(-rows // 8) * 8, division.columns)
    row_tiles = -(-rows // division.columns)
    all_sums = (shares, rows, packing.tiles * TILE)
    parts = torch.empty(all_sums, dtype=torch.float32, device=x.device) if shares > 1 else None
    beside = (around.rows, around.columns, around.bias)
    is_wide = outputs % 8 == 0 and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0
    ends = (shares, int(bool(around.gate)), int(around.residual is not None), int(is_wide))
    sizes = (y.stride(0), rows, packing.outputs, packing.tiles)
    jit.launch(
        variant,
        "packed_pipe",
        (-(-packing.outputs // division.rows) * row_tiles * shares,),
        _GROUPS * 128 + 128,
        tensor_map.boxes(x, rows, x.shape[1], copied, x.stride(0)),
        *_maps(weight, groups, division.tiles),
        *beside,
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
        num_slots(packing, division.columns, division.tiles, kept),
        row_tiles,
        *behind,
        shared_memory=num_bytes(packing, division, kept) + of_terms,
        overlaps=True,
    )
    if shares > 1:
        grid = (-(-rows * -(-outputs // 8) // 256),)
        given = (parts, *beside, y, *sizes, *ends)
        jit.launch(variant, "packed_pipe_sum", grid, 256, *given, overlaps=True)
