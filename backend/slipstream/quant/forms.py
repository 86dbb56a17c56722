"""Ways to multiply with weights on a device; of quantised ones the first that takes them is used.

What none takes is dequantised as it is loaded, to the dtype of the model, and multiplied as weights
that were never quantised: that needs the memory of 16 or 32 bits, and rounds each weight once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.cpu.native import library
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.gemm import cpu_packing, packing, records
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import CodeType, Groups, Packing
from slipstream.kernels.runtime.registry import Target
from slipstream.quant.matrix import Kind, QuantMatrix, RowType, codes_of, multiplied
from slipstream.quant.row_forms import (
    Factored,
    make_e4m3,
    make_int8,
    rounds,
    takes_e4m3,
    takes_int8,
)
from slipstream.quant.scheme import MatrixSource

_GROUPS = (32, 64, 128, 256)  # of torch's product with 4 bits
_TILE = 32  # outputs of the same
_WHOLE = 16  # inputs that torch's product with 8 bits reads at a time
_BITS = {Kind.W4: 4, Kind.W8: 8}
_CODE_TYPES: dict[Kind, CodeType] = {Kind.W4: "integers", Kind.W8: "integers", Kind.F8: "e4m3"}
_TILE_BITS = _BITS | {Kind.F4: 4}  # of codes in tiles
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PIECE = 8  # inputs that a kernel copies at a time


class Packed(NamedTuple):
    """Weights as torch's GEMMs on a CPU take them."""

    form: str  # int8 or int4
    codes: Tensor
    scales: Tensor
    group: int


class Form(NamedTuple):
    """A way to multiply."""

    name: str
    takes: Callable[[QuantMatrix, Target, torch.dtype], bool]
    make: Callable[[QuantMatrix], Matrix | Packed | Factored]
    for_experts: bool = False  # whether kernels for experts take it
    keeps_rows: bool = False  # whether it is packed for a GPU, and rows stay in 16 bits
    row_type: RowType = ""  # to which rows are rounded

    def said(self, matrix: QuantMatrix) -> str:
        """Return how a matrix is multiplied, and that rows stay though it asks for others."""
        is_said = self.keeps_rows or matrix.row_type == self.row_type
        return self.name if is_said or not matrix.row_type else f"{self.name}, rows as they come"


def _is_exact(scales: Tensor) -> bool:
    """Whether scales are numbers of bfloat16, in which these GEMMs keep them.

    Of those without data only their type is known: others are rarely such numbers.
    """
    if scales.is_meta:
        return scales.dtype == torch.bfloat16
    return torch.equal(scales.bfloat16().float(), scales.float())


def _takes_int8(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    by_row = matrix.group >= matrix.inputs and matrix.outer is None
    fits = matrix.kind is Kind.W8 and by_row and matrix.is_symmetric and matrix.is_plain
    is_here = target.device == "cpu" and dtype == torch.bfloat16  # fp32 is slower than its own
    # Of other inputs torch reads beyond a row: infinities, or the end of the process.
    fits = fits and matrix.inputs % _WHOLE == 0
    return fits and is_here and _is_exact(matrix.scales)


def _make_int8(matrix: QuantMatrix) -> Packed:
    scales = matrix.scales[:, 0].to(torch.bfloat16).contiguous()
    return Packed("int8", matrix.codes.contiguous(), scales, matrix.inputs)


def _takes_int4(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    whole = matrix.inputs % matrix.group == 0 and matrix.outputs % _TILE == 0
    fits = matrix.kind is Kind.W4 and matrix.group in _GROUPS and whole and matrix.outer is None
    fits = fits and matrix.is_symmetric and matrix.is_plain  # zeros would be rounded to bfloat16
    is_here = target.device == "cpu" and dtype == torch.bfloat16
    return fits and is_here and _is_exact(matrix.scales)


def _make_int4(matrix: QuantMatrix) -> Packed:
    codes = codes_of(matrix).to(torch.int32).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = matrix.scales.to(torch.bfloat16).T
    both = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    return Packed("int4", packed, both, matrix.group)


def _takes_packed(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    if matrix.kind not in _CODE_TYPES or target.device != "cuda" or dtype not in eight_bits.DTYPES:
        return False
    if matrix.kind is Kind.F8 and matrix.zeros is not None:
        return False
    is_linear = matrix.minimums is None and matrix.outer is None and matrix.scales.dtype in _FLOATS
    has_groups = packing.group_of(matrix.group, matrix.inputs) is not None
    return is_linear and has_groups and matrix.inputs % _PIECE == 0


def _takes_packed_e4m3(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    is_here = target.device == "cuda" and target.capability == (9, 0) and dtype == torch.bfloat16
    fits = matrix.kind is Kind.W4 and matrix.is_symmetric and matrix.row_type == "e4m3"
    return is_here and fits and rounds(matrix) and _takes_packed(matrix, target, dtype)


def _takes_blocks(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    is_here = target.device == "cuda" and target.capability == (9, 0) and dtype == torch.bfloat16
    fits = matrix.kind is Kind.F8 and matrix.row_type == "e4m3" and rounds(matrix)
    has_blocks = matrix.group >= matrix.inputs or matrix.group % packing.BLOCK == 0
    return is_here and fits and has_blocks and _takes_packed(matrix, target, dtype)


def make_blocks(matrix: QuantMatrix) -> Matrix:
    """Put e4m3 in the order of the kernels for rows of 16 bits; many rows may be e4m3, too."""
    made = make_packed(matrix)
    assert made.groups is not None, "it is packed"
    sizes = made.groups.packing._replace(can_round_rows=True)
    return made._replace(groups=made.groups._replace(packing=sizes))


def make_packed_e4m3(matrix: QuantMatrix) -> Matrix:
    """Put codes of 4 bits in the order of the kernel for rows of e4m3."""
    return _make_packed(matrix, for_e4m3=True)


def make_packed(matrix: QuantMatrix) -> Matrix:
    """Put codes, scales and zeros in the order of the kernels for rows of 16 bits."""
    return _make_packed(matrix, for_e4m3=False)


def _make_packed(matrix: QuantMatrix, for_e4m3: bool) -> Matrix:
    bits, group = _BITS.get(matrix.kind, 8), packing.group_of(matrix.group, matrix.inputs)
    assert group is not None, "the form was asked"
    zeros, scales = matrix.zeros, matrix.scales
    sizes = (matrix.outputs, matrix.inputs, scales.dtype, zeros is not None)
    made = Packing(bits, group, *sizes, _CODE_TYPES[matrix.kind], for_e4m3)
    unsigned = _unsigned(codes_of(matrix), matrix.kind)
    values = packing.pack(unsigned, bits, made.middle, for_e4m3)
    if zeros is not None:
        zeros = packing.by_tile(_unsigned(zeros, matrix.kind), made, made.middle)
    if matrix.kind is Kind.F8:
        scales = packing.scales_with_nan(scales, unsigned, matrix.group)
    by_tile = packing.by_tile(scales, made, 0)
    groups = Groups(made, by_tile, zeros, matrix.order, matrix.factors)
    return Matrix(values, groups=groups)


def _unsigned(codes: Tensor, kind: Kind) -> Tensor:
    """Return codes or zeros as kernels have them, u8: those that have a sign from 0 on."""
    if kind is Kind.F8:
        return codes.view(torch.uint8)
    return (codes.to(torch.int16) + packing.MIDDLE[8]).to(torch.uint8) if kind is Kind.W8 else codes


def _record(matrix: QuantMatrix) -> str | None:
    """Return the record that a matrix of integers has on a GPU; None: it has none."""
    is_4, has = matrix.kind is Kind.W4, matrix.minimums is not None
    if matrix.kind not in _BITS or matrix.outer is not None or is_4 != (matrix.zeros is not None):
        return None  # 4 bits without zeros have no minimums
    if matrix.zeros is not None and not matrix.zeros.is_meta and bool(matrix.zeros.any()):
        return None
    if matrix.units is not None:
        if matrix.group == records.INPUTS and has:
            return "shared"
        by_halves = matrix.group == records.INPUTS // 2 and not is_4
        return ("wide" if has else "halves") if by_halves else None
    dtypes = {each.dtype for each in (matrix.scales, matrix.minimums) if each is not None}
    is_pair = has and matrix.group == records.INPUTS and dtypes == {torch.float16}
    return "pair" if is_pair else None


def takes_records(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    """Return whether the kernels of a GPU take weights with records (`records.py`)."""
    is_here = target.device == "cuda" and dtype in eight_bits.DTYPES
    return is_here and matrix.inputs % _PIECE == 0 and _record(matrix) is not None


def make_records(matrix: QuantMatrix) -> Matrix:
    """Put codes, and records of scales and minimums, in the order of the kernels."""
    bits, record = _BITS[matrix.kind], _record(matrix)
    assert record is not None, "the form was asked"
    sizes = (matrix.outputs, matrix.inputs)
    made = Packing(bits, records.INPUTS, *sizes, torch.float16, False, record=record)
    values = packing.pack(_unsigned(codes_of(matrix), matrix.kind), bits, made.middle)
    numbers = records.Numbers(matrix.scales, matrix.minimums, matrix.units, matrix.low_units)
    of_rows = records.made(record, numbers, made.groups)
    scales = packing.records_by_tile(of_rows, made)
    return Matrix(values, groups=Groups(made, scales, None, matrix.order, matrix.factors))


def _lifted(matrix: QuantMatrix, dtype: torch.dtype) -> Tensor | None:
    """Return scales of e2m1 as the kernels for a dtype have them; None where some cannot be had."""
    exact = matrix.scales.float() * packing.LIFTS[dtype]
    kept = exact.to(dtype)
    if kept.is_meta:
        return kept
    # What fp32 has no room for is infinity on both sides.
    return kept if torch.equal(kept.float(), exact) and bool(kept.isfinite().all()) else None


def _takes_floats(matrix: QuantMatrix, target: Target, dtype: torch.dtype, of: torch.dtype) -> bool:
    if matrix.kind is not Kind.F4 or matrix.table is not None or matrix.minimums is not None:
        return False
    if target.device != "cuda" or dtype != of or matrix.inputs % _PIECE:
        return False
    has_groups = packing.group_of(matrix.group, matrix.inputs, "e2m1") is not None
    return has_groups and _lifted(matrix, of) is not None


def make_floats(matrix: QuantMatrix, of: torch.dtype) -> Matrix:
    """Put e2m1 and its scales in the order of the kernels, for rows `of` a dtype."""
    group, scales = packing.group_of(matrix.group, matrix.inputs, "e2m1"), _lifted(matrix, of)
    assert group is not None, "the form was asked"
    assert scales is not None, "the form was asked"
    made = Packing(4, group, matrix.outputs, matrix.inputs, of, False, "e2m1")
    values = packing.pack_e2m1(codes_of(matrix))
    groups = Groups(made, packing.by_tile(scales, made, 0), None, matrix.order, matrix.factors)
    shrunk = torch.tensor(1 / packing.SHRUNK, dtype=torch.float32, device=scales.device)
    factors = shrunk.repeat(matrix.outputs)
    return Matrix(values, factors if matrix.outer is None else factors * matrix.outer, groups)


def takes_tiles(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> bool:
    """Return whether the processor's kernels take weights as they are."""
    if matrix.kind not in _TILE_BITS or target.device != "cpu" or dtype != torch.float32:
        return False
    bits = 8 if _has_small_groups(matrix) else _TILE_BITS[matrix.kind]
    fits = cpu_packing.takes_group(bits, matrix.group, matrix.inputs) and matrix.table is None
    return fits and library() is not None


def _has_small_groups(matrix: QuantMatrix) -> bool:
    """Whether e2m1 has smaller groups than tiles of 4 bits have; twice it is a number of 8 bits."""
    is_part = matrix.group < matrix.inputs and matrix.group % cpu_packing.BLOCK != 0
    return matrix.kind is Kind.F4 and is_part


def _doubled(matrix: QuantMatrix) -> QuantMatrix:
    """Return e2m1 with half the scale, as tiles have it; of small groups as whole numbers."""
    matrix = replace(matrix, scales=matrix.scales.float() / 2)
    if not _has_small_groups(matrix):
        return matrix
    codes = codes_of(matrix)
    numbers = (2 * packing.e2m1_table(codes.device)).to(torch.int8)
    whole = codes.to(torch.int8) if codes.is_meta else numbers[codes.long()]
    return replace(matrix, kind=Kind.W8, codes=whole)


def make_tiles(matrix: QuantMatrix) -> Matrix:
    """Put codes, scales and minimums in the order of the processor's kernels.

    Zeros become minimums. Scales stay fp16 if all are so and none would be rounded; else fp32.
    Those of e2m1, mostly powers of two, become fp16 if none would be rounded.
    """
    if matrix.kind is Kind.F4:
        matrix = _doubled(matrix)
    matrix = multiplied(matrix)
    bits, scales, minimums = _TILE_BITS[matrix.kind], matrix.scales, matrix.minimums
    floats = matrix.kind is Kind.F4
    own = [each for each in (scales, minimums) if each is not None]
    halves = all(each.dtype == torch.float16 or floats for each in own) and matrix.outer is None
    if scales.is_meta and matrix.zeros is not None:
        halves = halves and minimums is not None  # else zeros times scales, rarely fp16
    scales = scales.float()
    zeros = cpu_packing.MIDDLE[bits] if matrix.zeros is None else matrix.zeros.float()
    if matrix.zeros is not None or minimums is not None:
        minimums = -zeros * scales + (0 if minimums is None else minimums.float())
    if matrix.outer is not None:
        scales = scales * matrix.outer[:, None]
        minimums = None if minimums is None else minimums * matrix.outer[:, None]
    for each in (minimums, scales if floats else None):
        if each is not None and halves and not each.is_meta:
            halves = torch.equal(each.half().float(), each)
    has = minimums is not None
    sizes = (matrix.outputs, matrix.inputs)
    made = cpu_packing.packing_of(
        bits, matrix.group, *sizes, halves, has, "e2m1" if floats else "integers"
    )
    values = cpu_packing.pack(codes_of(matrix).view(torch.uint8), bits)
    tiled = [None if x is None else cpu_packing.by_tile(x, made.scale) for x in (scales, minimums)]
    assert tiled[0] is not None, "there are scales"
    order, factors = matrix.order, matrix.factors
    return Matrix(values, groups=Groups(made, tiled[0], None, order, factors, tiled[1]))


def make_numbers(weight: Tensor) -> Matrix:
    """Put weights of 16 or 32 bits, `[n, k]`, in the order of the processor's kernels."""
    packing = cpu_packing.packing_of_numbers(weight)
    return Matrix(cpu_packing.pack_numbers(weight), groups=Groups(packing, weight.new_empty(0)))


def as_rows(weight: Tensor, target: Target) -> Matrix | None:
    """Take weights `[n, k]` for the processor's kernels as they lie; None: these do not."""
    is_taken = target.device == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    if not is_taken or library() is None:
        return None
    return Matrix(weight, groups=Groups(cpu_packing.packing_of_rows(weight), weight.new_empty(0)))


def takes_numbers(w: MatrixSource) -> bool:
    """Whether the processor's kernels multiply with weights that are not quantised."""
    return w.target.device == "cpu" and w.dtype == torch.float32 and library() is not None


def dtype_of_numbers(w: MatrixSource, names: Sequence[str]) -> torch.dtype:
    """Return the dtype that tensors have for these: their own if all are of one, else fp32."""
    found = {w.dtype_of(name) for name in names}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in cpu_packing.NUMBERS else w.dtype


def read_numbers(
    w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int, whose: str = ""
) -> Matrix:
    """Read the matrices `NAME.weight`, which are not quantised, under one another.

    For the processor's kernels they stay 16 bits if the checkpoint has them so, all of one type;
    the start says so of `whose` weights they are.
    """
    full = [f"{name}.weight" for name in names]
    if not takes_numbers(w):
        return Matrix(w.stacked(full, outputs, inputs))
    dtype = dtype_of_numbers(w, full)
    w.note(f"{whose}weights of {str(dtype).removeprefix('torch.')}: {FORMS[0].name}")
    return make_numbers(w.stacked(full, outputs, inputs, dtype=dtype))


FORMS = (
    Form("multiplied as they are by the CPU kernels", takes_tiles, make_tiles, True),
    Form("e4m3 products, rows quantised by token", takes_e4m3, make_e4m3, True, row_type="e4m3"),
    Form("int8 products, rows quantised by token", takes_int8, make_int8, row_type="int8"),
    Form("torch's product with 8 bits", _takes_int8, _make_int8),
    Form("torch's product with 4 bits", _takes_int4, _make_int4),
    Form(
        "kept packed, rows quantised by token",
        _takes_packed_e4m3,
        make_packed_e4m3,
        row_type="e4m3",
    ),
    Form(
        "kept packed, rows of long prompts quantised by token",
        _takes_blocks,
        make_blocks,
        row_type="e4m3",
    ),
    Form("kept packed, multiplied with 16-bit rows", _takes_packed, make_packed, True, True),
    Form("kept packed, multiplied with 16-bit rows", takes_records, make_records, True, True),
    *(
        Form(
            "kept packed, multiplied with 16-bit rows",
            partial(_takes_floats, of=dtype),
            partial(make_floats, of=dtype),
            True,
            True,
        )
        for dtype in eight_bits.DTYPES
    ),
)


def form_of(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> Form | None:
    """Return the first form that takes weights on a device; None: they must be dequantised."""
    return next((form for form in FORMS if form.takes(matrix, target, dtype)), None)


def packs_ends(target: Target) -> bool:
    """Return whether head and embedding may stay packed as `form_of_ends` has them."""
    return target.device == "cuda"


def form_of_ends(matrix: QuantMatrix, target: Target, dtype: torch.dtype) -> Form | None:
    """Return the form on a GPU of head or embedding, whose rows keep 16 bits; None: as `form_of`.

    Rows of an embedding are no product's, and logits of a head are not rounded further.
    """
    own = (form for form in FORMS if form.keeps_rows)
    return next((form for form in own if form.takes(matrix, target, dtype)), None)


def form_of_experts(
    matrix: QuantMatrix, count: int, target: Target, dtype: torch.dtype
) -> Form | None:
    """Return the form of `count` gates, ups or outputs of experts under one another.

    Each begins at a tile, and inputs of all come as they are. None: as `form_of`.
    """
    if not matrix.is_plain or matrix.outputs % (count * packing.TILE):
        return None
    own = (form for form in FORMS if form.for_experts)
    return next((form for form in own if form.takes(matrix, target, dtype)), None)


def product(x: Tensor, weights: Packed) -> Tensor:
    """`x W^T` of bfloat16 rows on a CPU, `[n, m]`, summed in fp32 and rounded once."""
    if weights.form == "int8":
        return torch._weight_int8pack_mm(x, weights.codes, weights.scales)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, weights.codes, weights.group, weights.scales
    )
    return y
