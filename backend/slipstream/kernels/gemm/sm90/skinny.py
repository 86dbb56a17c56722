"""Skinny GEMMs, of up to 128 rows, on Hopper's tensor cores (sm_90a): memory-bound. Gated ones of
16 bits have 169 to 192 rows, too.

A tile of weight rows belongs to one CTA, or to a cluster of CTAs that share out the width where
there are few rows.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import E4M3, INT8, PRODUCTS
from slipstream.kernels.gemm.op import PLAIN, Around, Spec, gemm
from slipstream.kernels.runtime import jit, tensor_map

DTYPES = (torch.float16, torch.bfloat16, E4M3, INT8)
# Of rows of 8 bits that are scaled.
OUTPUTS = {E4M3: (torch.bfloat16,), INT8: (torch.bfloat16, torch.float16)}
MAX_ROWS = 128
# Of 16 bits with a gate, a tile a CTA. With fewer rows cuBLASLt and the gate's kernel are faster on
# an H200 (2026-11-30-gated-rows-h200.txt); more are tall.
GATED_ROWS = range(169, 193)
GROUP_ROWS = 64  # of x, for each group of warps
CLUSTERS = (1, 2, 4)
TILE_ROWS = range(16, 225, 16)
GATED_TILE_ROWS = range(128, 225, 32)  # of three groups, which multiply by halves
_FEWEST_TILE_ROWS = {1: 64, 2: 48, 4: 16}  # a narrower tile reads more of x than of the weights
_MOST_SHARED_ROWS = {1: 112, 2: 224}  # of a cluster's tile, by groups
# Of more than 64 rows of x, power is the limit, and reading x costs some: tiles are to have so many
# rows, where the clusters for that leave each CTA so many steps.
_THRIFTY_TILE_ROWS, _THRIFTY_STEPS = 128, 48
CHUNK_BYTES = 128  # of a row
MAX_SLOTS = 16
BARRIER_BYTES = 16  # of a slot
PIECE_BYTES = 64 * 8 * 4  # of a group's sums for eight weight rows
MEMORY = 226 << 10  # of a CTA; a kernel of a norm finds room beside it


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """Division of a GEMM: tiles of `rows` weight rows, a cluster of CTAs for each."""

    rows: int
    groups: int  # of 64 rows of x
    cluster: int

    @property
    def chunks(self) -> int:
        """Count the pieces of 128 bytes of each row in a slot."""
        return 2 if self.groups == 1 else 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, weights and x."""
        return (self.rows + GROUP_ROWS * self.groups) * self.chunks * CHUNK_BYTES

    @property
    def end_bytes(self) -> int:
        """Bytes beside the ring: scales and biases of columns, and sums from the other CTAs.

        Where two groups are in clusters of four, that comes to where the ring was.
        """
        columns = BARRIER_BYTES + 2 * 4 * self.rows
        if self.cluster == 4 and self.groups == 2:
            return columns
        own = 2 * -(-self.rows // (16 * self.cluster))  # pieces of eight columns
        return columns + (self.cluster - 1) * own * PIECE_BYTES * self.groups

    @property
    def num_slots(self) -> int:
        """Count the slots that fit into the shared memory of a multiprocessor."""
        slots = (MEMORY - self.end_bytes) // (self.slot_bytes + BARRIER_BYTES)
        return min(slots, MAX_SLOTS)

    @property
    def bytes(self) -> int:
        """Bytes of shared memory."""
        return self.num_slots * (self.slot_bytes + BARRIER_BYTES) + self.end_bytes


def _rows_and_waves(num_weight_rows: int, cluster: int, multiprocessors: int) -> tuple[int, int]:
    tiles = multiprocessors // cluster
    if cluster == 4:  # not every multiprocessor finds three others of its cluster
        tiles = tiles * 10 // 11
    waves = -(-num_weight_rows // (tiles * TILE_ROWS[-1]))
    return -(-num_weight_rows // (tiles * waves * 16)) * 16, waves


@functools.cache
def tiling(
    num_rows: int, num_weight_rows: int, num_chunks: int, multiprocessors: int
) -> SkinnyTiling:
    """For `num_rows` rows of x: every multiprocessor gets a part of the weights, the same for all.

    The sums of an output are added in an order that does not depend on `num_rows`, but for whether
    these are two groups.
    """
    groups = -(-num_rows // GROUP_ROWS)
    tilings = {c: _rows_and_waves(num_weight_rows, c, multiprocessors) for c in CLUSTERS}
    chosen = next(c for c, (rows, _) in tilings.items() if rows >= _FEWEST_TILE_ROWS[c])
    if groups == 2 and tilings[chosen][0] < _THRIFTY_TILE_ROWS:
        for cluster, (rows, waves) in tilings.items():
            if rows >= _THRIFTY_TILE_ROWS and waves == 1 and num_chunks >= cluster * _THRIFTY_STEPS:
                chosen = cluster
                break
    return SkinnyTiling(tilings[chosen][0], groups, chosen)


def gated_tiling(num_weight_rows: int, multiprocessors: int) -> SkinnyTiling:
    """For `GATED_ROWS` rows of x behind a gate: a tile for each multiprocessor."""
    step = GATED_TILE_ROWS.step
    return SkinnyTiling(-(-num_weight_rows // (multiprocessors * step)) * step, 3, 1)


def _refuses_gated(spec: Spec) -> str | None:
    if spec.rows not in GATED_ROWS or not spec.gate or spec.x in PRODUCTS:
        gated = f"{GATED_ROWS[0]} to {GATED_ROWS[-1]} of 16 bits with a gate"
        return f"takes 1 to {MAX_ROWS} rows, and {gated}"
    if gated_tiling(spec.outputs, spec.target.multiprocessors).rows not in GATED_TILE_ROWS:
        fewest, most = GATED_TILE_ROWS[0], GATED_TILE_ROWS[-1]
        return f"takes {fewest} to {most} outputs a multiprocessor of more than {MAX_ROWS} rows"
    return None


def takes(spec: Spec) -> str | None:
    """Say why the kernel is not built for a product, or not the fastest; None: it is."""
    if spec.rows < 1:
        return f"takes 1 to {MAX_ROWS} rows"
    if spec.rows > MAX_ROWS and (why := _refuses_gated(spec)) is not None:
        return why
    if (why := shared_refusal(spec)) is not None:
        return why
    chunk = CHUNK_BYTES // spec.x.itemsize
    if spec.inputs % chunk or spec.inputs < chunk * max(CLUSTERS):
        return f"takes multiples of {chunk} inputs, {chunk * max(CLUSTERS)} at least"
    multiple = 16 if spec.gate else 8
    if spec.outputs % multiple:
        return f"takes multiples of {multiple} outputs"
    multiprocessors = spec.target.multiprocessors
    if spec.rows > GROUP_ROWS and spec.outputs > TILE_ROWS[-1] * multiprocessors:
        return f"is slower than cuBLASLt in several waves of more than {GROUP_ROWS} rows"
    return None


def shared_refusal(spec: Spec) -> str | None:
    """Say why no kernel of wgmma and tensor maps takes a product; None: one may."""
    if spec.x not in DTYPES or spec.weight != spec.x:
        return "takes rows and weights of one type: fp16, bf16, e4m3 or int8"
    if spec.norm:
        return "has no norm"
    if spec.gate not in ("", "silu"):
        return "gates by SiLU alone"
    if spec.x in PRODUCTS:
        if spec.scales and spec.out not in OUTPUTS[spec.x]:
            return "scales e4m3 to bf16, and int8 to 16 bits"
        if not spec.scales and (spec.bias or spec.gate or spec.residual):
            return "adds and gates what it scales"
    if not (spec.x_aligned and spec.x_pitch and spec.weight_aligned):
        return "takes what is aligned to 16 bytes"
    return None


def _variant(
    dtype: torch.dtype, tiles: SkinnyTiling, out: torch.dtype = torch.bfloat16
) -> jit.Variant:
    element, kind = kind_of(dtype, out)
    sizes = {"ROWS": tiles.rows, "GROUPS": tiles.groups, "CLUSTER": tiles.cluster}
    if tiles.groups == 3:
        sizes["AT_ONCE"] = tiles.rows // 2
    return jit.variant("gemm/sm90/skinny.cu", element, **kind, **sizes)


def kind_of(dtype: torch.dtype, out: torch.dtype) -> tuple[torch.dtype, dict[str, int]]:
    """Return the type of outputs of such rows, `out` of 8 bits, and the macros for that of rows."""
    kind = {"FP8": int(dtype == E4M3)} | ({"INT8": 1} if dtype == INT8 else {})
    return out if dtype in PRODUCTS else dtype, kind


def kinds() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """Yield the types of rows, each with those of outputs."""
    for dtype in DTYPES:
        for out in OUTPUTS.get(dtype, (dtype,)):
            yield dtype, out


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for (dtype, out), groups, cluster in itertools.product(kinds(), (1, 2), CLUSTERS):
        most = TILE_ROWS[-1] if cluster == 1 else _MOST_SHARED_ROWS[groups]
        for rows in range(_FEWEST_TILE_ROWS[cluster], most + 1, TILE_ROWS.step):
            yield _variant(dtype, SkinnyTiling(rows, groups, cluster), out)
    for dtype, rows in itertools.product(DTYPES[:2], GATED_TILE_ROWS):
        yield _variant(dtype, SkinnyTiling(rows, 3, 1))


@gemm.implementation("skinny", "cuda", "sm_90a", takes=takes)
def skinny(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU, without a norm."""
    scales, gated = around.scales, bool(around.gate)
    by_row, by_column, bias = (None, None, around.bias) if scales is None else scales
    num_rows, width = x.shape
    num_weight_rows = weight.shape[0]
    num_outputs = num_weight_rows // (2 if gated else 1)
    y = around.residual
    if y is None:
        dtype = PRODUCTS.get(x.dtype, x.dtype) if scales is None else around.out_dtype(x)
        y = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    jit.require(
        y.stride(1) == 1 and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0,
        "skinny: rows of the residual must be contiguous, and aligned to 16 bytes",
    )
    num_chunks = width * x.itemsize // CHUNK_BYTES
    multiprocessors = jit.num_multiprocessors(x.get_device())
    tiles = tiling(num_rows, num_weight_rows, num_chunks, multiprocessors)
    if num_rows > MAX_ROWS:
        tiles = gated_tiling(num_weight_rows, multiprocessors)
    share = tiles.rows // (2 if gated else 1)
    copied = -(-num_rows // 8) * 8
    jit.launch(
        _variant(x.dtype, tiles, y.dtype if scales is not None else torch.bfloat16),
        "skinny",
        (-(-num_outputs // share) * tiles.cluster,),
        128 * tiles.groups + (128 if tiles.groups == 3 else 64),
        tensor_map.eights(weight, tiles.chunks, share),
        tensor_map.boxes(x, num_rows, width, copied, x.stride(0)),
        by_row,
        by_column,
        bias,
        y,
        y.stride(0),
        num_rows,
        num_outputs,
        -(-num_chunks // tiles.chunks),
        int(gated),
        tiles.num_slots,
        copied,
        int(around.residual is not None),
        shared_memory=tiles.bytes,
        overlaps=True,
    )
    return y
