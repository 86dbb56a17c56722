"""GEMMs of rows with the weights of their experts: gates and ups, then outputs of pairs.

Where experts have few rows, tiles are of eight and weights are read straight into registers
(`skinny.cu`). Larger tiles are `tiled.cu`'s, whose sums have one order whatever the tile is; on
Hopper those of 32 rows and more are `sm90/piped.cu`'s, whose sums may have another, and all of e4m3
`sm90/streamed.cu`'s, which rounds rows to e4m3, too. Weights that are packed in 4 or 8 bits have a
kernel of their own for all tiles, `packed.cu`, beside rows in 16 bits.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.elementwise.eight_bits import E4M3
from slipstream.kernels.experts import packed
from slipstream.kernels.experts.kind import DTYPES, KINDS, MULTIPLE, Kind
from slipstream.kernels.experts.route import Routed
from slipstream.kernels.experts.sm90 import piped, streamed
from slipstream.kernels.experts.spec import Gate
from slipstream.kernels.gemm.op import Matrix, unpacked
from slipstream.kernels.gemm.packing import Groups, Packing
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op
from slipstream.kernels.runtime.registry import CPU, Target, target_of

SKINNY_ROWS = 8  # of a tile of `skinny.cu`
TILE_ROWS = (16, 32, 64, 128)  # of `tiled.cu`
# The most pairs an expert, on average, for each size of tiles. On an H200 these are the fastest
# for experts of two shapes with averages of 0.06 to 8, 32 and 128; between them most experts are to
# have one tile. Tiles of 128 by e4m3 are slower than two of 64.
_MOST_PAIRS = {SKINNY_ROWS: 0.4, 16: 10, 32: 22, 64: 80, 128: math.inf}
_MOST_FP8_PAIRS = {SKINNY_ROWS: 1.5, 16: 10, 32: 48, 64: math.inf}
_COLUMNS = 128  # weight rows of a tile
_CHUNK_BYTES = 128  # of a weight row in a slot
_SLOTS_BYTES = 98 << 10  # two CTAs a multiprocessor
_MOST_SLOTS = 6
_SKINNY_OUTPUTS = 8  # of 16 weight rows, gated
_FIXED_ROWS = 16  # of every product on a CPU whose rows may not depend on each other


class Added(NamedTuple):
    """What adapters add to sums of places."""

    values: Tensor  # [p, m], of rows' dtype; undefined where there is none
    marks: Tensor  # [p] i32: 1: there is such

    def to(self, product: Tensor, part: slice) -> Tensor:
        """Return sums of some places, `[_, m] f32`, with what is added to them."""
        own = self.values[part].float()
        return torch.where(self.marks[part, None] != 0, product + own, product)


class ExpertMatrix(NamedTuple):
    """Weights of all experts: of e4m3 times a scale for each row, or packed."""

    values: Tensor  # [e, m, k], of the model's dtype or e4m3; packed ones [e, tiles, _]
    scales: Tensor | None = None  # [e, m] f32, of e4m3 by rows, or of rows of what is packed
    bias: Tensor | None = None  # [e, m]
    groups: Groups | None = None  # of packed values: the packing of one expert, tensors [e, ...]

    @property
    def outputs(self) -> int:
        """Rows of an expert's weights, m."""
        return self.values.shape[1] if self.groups is None else self.groups.packing.outputs

    @property
    def inputs(self) -> int:
        """Columns of the weights, k."""
        return self.values.shape[2] if self.groups is None else self.groups.packing.inputs

    def matrix(self, expert: int) -> Matrix:
        """Return one expert's weights, as those of a linear layer."""
        scales = None if self.scales is None else self.scales[expert]
        if (groups := self.groups) is not None:
            own = (groups.scales, groups.zeros, groups.minimums)
            of_groups, zeros, minimums = (None if x is None else x[expert] for x in own)
            assert of_groups is not None, "groups have scales"
            groups = groups._replace(scales=of_groups, zeros=zeros, minimums=minimums)
        return Matrix(self.values[expert], scales, groups)

    def of(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Return one expert's weights and bias, in fp32."""
        values, scales, groups = self.matrix(expert)
        weight = values.float() if groups is None else unpacked(values, groups)
        if scales is not None:
            weight = weight * scales[:, None]
        return weight, None if self.bias is None else self.bias[expert].float()


def expert_matrix(matrix: Matrix, count: int, bias: Tensor | None) -> ExpertMatrix:
    """Divide weights of `count` experts under one another, `[e * m, k]`; packed by whole tiles."""

    def divided(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.view(count, -1, *x.shape[1:])

    values, scales, groups = divided(matrix.values), matrix.scales, matrix.groups
    assert values is not None, "there are weights"
    if groups is not None:
        assert groups.is_plain, "inputs of all experts come as they are"
        packing = groups.packing._replace(outputs=groups.packing.outputs // count)
        of_groups = divided(groups.scales)
        assert of_groups is not None, "groups have scales"
        zeros, minimums = divided(groups.zeros), divided(groups.minimums)
        groups = Groups(packing, of_groups, zeros, minimums=minimums)
    return ExpertMatrix(values, None if scales is None else scales.view(count, -1), bias, groups)


def tile_rows(
    num_pairs: int,
    num_experts: int,
    is_fp8: bool = False,
    deterministic: bool = False,
    target: Target = CPU,
    packings: Sequence[Packing] = (),
) -> int:
    """Return the rows of a tile for so many pairs on a device, by which the kernel is chosen.

    Sums of tiles of 8 have another order than those of others: deterministic mode takes one. All
    kernels have the tiles of weights in `packings`, which are those of a layer that are packed.
    """
    average = num_pairs / num_experts
    sizes: Mapping[int, float] = _MOST_FP8_PAIRS if is_fp8 else _MOST_PAIRS
    if packings:
        all_e2m1 = all(each.scales_numbers for each in packings)
        sizes = packed.MOST_E2M1_PAIRS if all_e2m1 else packed.MOST_PAIRS
    elif streamed.refusal(target, deterministic, is_fp8) is None:
        sizes = {SKINNY_ROWS: sizes[SKINNY_ROWS]} | streamed.MOST_PAIRS
    elif piped.runs_on(target, deterministic):
        few = {rows: most for rows, most in sizes.items() if rows < piped.TILE_ROWS[0]}
        sizes = few | piped.MOST_PAIRS
    found = next(rows for rows, most in sizes.items() if average <= most)
    return max(found, TILE_ROWS[0]) if deterministic else found


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """Return the gated values of `[gate | up]`, computed in fp32, in its dtype.

    A value's bits do not depend on how many there are: torch's `silu` and `sigmoid` compute the
    last ones of a tensor otherwise on a CPU, its `exp` does not.
    """
    gates, ups = gate_up.float().chunk(2, -1)
    if gate is Gate.SILU:
        return (gates / (1 + torch.exp(-gates)) * ups).to(gate_up.dtype)
    gates, ups = gates.clamp(max=7.0), ups.clamp(-7.0, 7.0)
    return (gates / (1 + torch.exp(-1.702 * gates)) * (ups + 1)).to(gate_up.dtype)


def _each(
    rows: Tensor, matrix: ExpertMatrix, routed: Routed, fixed: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the places of each expert that has some, and `x W^T + b` of their rows, in fp32."""
    ends = routed.offsets.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        weight, bias = matrix.of(expert)
        part = slice(begin, end)
        x = rows[part].float()
        if not fixed:
            yield part, functional.linear(x, weight, bias)
            continue
        filled = functional.pad(x, (0, 0, 0, -len(x) % _FIXED_ROWS))
        found = [functional.linear(some, weight, bias) for some in torch.split(filled, _FIXED_ROWS)]
        yield part, torch.cat(found)[: len(x)]


class ExpertSpec(NamedTuple):
    """All that implementations choose by."""

    x: torch.Size
    values: torch.Size
    dtype: torch.dtype  # of rows
    weight: torch.dtype
    device: torch.device
    packing: Packing | None  # of packed weights


def spec_of(x: Tensor, values: Tensor, matrix: ExpertMatrix, *_: object) -> ExpertSpec:
    """Return the spec of a product."""
    packing = None if matrix.groups is None else matrix.groups.packing
    return ExpertSpec(x.shape, values.shape, x.dtype, values.dtype, x.device, packing)


@op("x[n,_]:T, values[e,_,_]:W", spec=spec_of, package=__package__)
def gate_up(
    x: Tensor,
    values: Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    gate: Gate,
    deterministic: bool = False,
    added: Added | None = None,
) -> Tensor:
    """Return `act(gate) * up` of every place, `[p, m / 2]`: in fp32, rounded once.

    Args:
        x: rows, of 16 or 32 bits.
        values: `matrix.values`.
        matrix: weights, `[gate | up]` of each expert.
        routed: rows and experts of places.
        gate: the activation.
        deterministic: whether a row's result may not depend on its neighbours.
        added: to sums before the gate, in fp32.
    """
    out = torch.empty(len(routed.order), matrix.outputs // 2, dtype=x.dtype, device=x.device)
    rows = x[routed.order.long() // routed.top_k]
    for part, product in _each(rows, matrix, routed, deterministic):
        whole = product if added is None else added.to(product, part)
        out[part] = gated(whole, gate).to(x.dtype)
    return out


@op("x[p,_]:T, values[e,_,_]:W", spec=spec_of, package=__package__)
def down(
    x: Tensor, values: Tensor, matrix: ExpertMatrix, routed: Routed, deterministic: bool = False
) -> Tensor:
    """Return the outputs of every pair times its weight, `[p, m]`: in fp32, rounded once.

    Args:
        x: what `gate_up` returned, by places.
        values: `matrix.values`.
        matrix: weights of each expert.
        routed: as of `gate_up`.
        deterministic: as of `gate_up`.
    """
    out = torch.empty(len(routed.order), matrix.outputs, dtype=x.dtype, device=x.device)
    weights = routed.weights.flatten()
    for part, product in _each(x, matrix, routed, deterministic):
        pairs = routed.order[part].long()
        out[pairs] = (product * weights[pairs, None]).to(x.dtype)
    return out


gate_up.implementation("torch", "cpu")(gate_up.oracle)
down.implementation("torch", "cpu")(down.oracle)


# ---- on a GPU ----


def num_slots(rows: int, is_fp8: bool) -> int:
    """Count the slots of a ring, each of a chunk of a tile's weights and rows."""
    return min(_MOST_SLOTS, _SLOTS_BYTES // _slot_bytes(rows, is_fp8))


def _slot_bytes(rows: int, is_fp8: bool) -> int:
    return (rows * (2 if is_fp8 else 1) + _COLUMNS) * _CHUNK_BYTES


def tiles_of(target: Target, deterministic: bool, is_fp8: bool) -> dict[str, tuple[int, ...]]:
    """Return the kernels of weights that are not packed, and the rows of the tiles of each."""
    skinny = (SKINNY_ROWS,)
    if streamed.refusal(target, deterministic, is_fp8) is None:
        return {"skinny": skinny, "streamed": streamed.TILE_ROWS, "tiled": (), "piped": ()}
    taken = piped.TILE_ROWS if piped.runs_on(target, deterministic) else ()
    few = tuple(size for size in TILE_ROWS if not taken or size < taken[0])
    return {"skinny": skinny, "tiled": few, "piped": taken, "streamed": ()}


def _variant(kind: Kind, rows: int) -> jit.Variant:
    if rows == SKINNY_ROWS:
        return kind.variant("experts/skinny.cu")
    return kind.variant("experts/tiled.cu", ROWS=rows, SLOTS=num_slots(rows, kind.is_fp8))


def variants() -> Iterator[jit.Variant]:
    """Return every legal instantiation."""
    return itertools.starmap(_variant, itertools.product(KINDS, (SKINNY_ROWS, *TILE_ROWS)))


@gate_up.cuda
def _gate_up(
    x: Tensor,
    values: Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    gate: Gate,
    deterministic: bool = False,
    added: Added | None = None,
) -> Tensor:
    return _launch("gate_up", x, matrix, routed, gate, deterministic, added)


@down.cuda
def _down(
    x: Tensor, values: Tensor, matrix: ExpertMatrix, routed: Routed, deterministic: bool = False
) -> Tensor:
    return _launch("down", x, matrix, routed, None, deterministic)


def check(name: str, x: Tensor, values: Tensor, outputs: int) -> None:
    """Raise `KernelError` unless kernels of experts multiply rows `x` by weights `[e, m, k]`."""
    width, is_fp8 = x.shape[1], values.dtype == E4M3
    multiple = MULTIPLE * (2 if is_fp8 else 1)
    require: Callable[..., None] = jit.require
    require(x.dtype in DTYPES, "{}: experts have kernels for 16 bits, not {}", name, x.dtype)
    require(is_fp8 or values.dtype == x.dtype, "{}: weights are {}", name, values.dtype)
    require(values.is_contiguous(), "{}: weights must be contiguous", name)
    require(width == values.shape[2], "{}: {} inputs, not {}", name, width, values.shape[2])
    require(width % multiple == 0, "{}: width {} is not a multiple of {}", name, width, multiple)
    require(outputs % MULTIPLE == 0, "{}: {} outputs: no multiple of 8", name, outputs)
    require(jit.vector_width(width, x) == 16 // x.itemsize, "{}: rows are not aligned", name)


def _launch(
    name: str,
    x: Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    gate: Gate | None,
    deterministic: bool,
    added: Added | None = None,
) -> Tensor:
    values, width, streams = matrix.values, x.shape[1], 1 if gate is None else 2
    outputs = matrix.outputs // streams
    if matrix.groups is None:
        check(name, x, values, outputs)
    out = torch.empty((len(routed.order), outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    places = (routed.order, routed.weights, routed.tiles)
    sizes = (width, outputs, routed.top_k, 0 if gate is None else gate.value)
    given = (x, x.stride(0), values, matrix.scales, matrix.bias)
    args = (*given, *places, out, *sizes, *(added or ()))
    if matrix.groups is not None:
        packed.launch(name, x, matrix.groups, routed, streams, args, added is not None)
        return out
    rows = routed.tile_rows
    kind = Kind(x.dtype, values.dtype == E4M3, gate is not None, added is not None)
    sizes_of = tiles_of(target_of(x.device), deterministic, kind.is_fp8)

    def variant_for(size: int) -> jit.Variant:
        if size in sizes_of["streamed"]:
            return streamed.variant(kind, size)
        return (piped.variant if size in sizes_of["piped"] else _variant)(kind, size)

    jit.compile_too(variant_for(size) for sizes in sizes_of.values() for size in sizes)
    wanted = variant_for(rows)
    if rows in sizes_of["streamed"]:
        streamed.launch(wanted, x, values, routed, streams, outputs, args)
        return out
    if rows in sizes_of["piped"]:
        piped.launch(wanted, values, routed, streams, outputs, args)
        return out
    columns = (_COLUMNS if rows != SKINNY_ROWS else 2 * _SKINNY_OUTPUTS) // streams
    grid = (-(-outputs // columns), len(routed.tiles))
    if rows == SKINNY_ROWS:
        jit.launch(wanted, "skinny", grid, 128, *args, overlaps=True)
        return out
    memory = num_slots(rows, kind.is_fp8) * _slot_bytes(rows, kind.is_fp8)
    threads = 256 if rows > 32 else 128
    jit.launch(wanted, "tiled", grid, threads, *args, shared_memory=memory, overlaps=True)
    return out
