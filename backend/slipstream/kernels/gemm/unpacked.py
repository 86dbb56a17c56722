"""GEMMs with packed weights of many rows: the matrix in 16 bits again, for one product.

A step of many rows reads the weights once for all of them, so that writing them and reading them
back costs little beside it. The matrix takes memory while its product runs: a head, whose outputs
are a vocabulary, is multiplied a piece after another.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import PLAIN, Around, Matrix, Spec, gemm
from slipstream.kernels.gemm.packed import DTYPES, all_packings, defines, type_refusal
from slipstream.kernels.gemm.packing import TILE, Groups, Packing, arranged, dense
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_WARPS = 4  # of a CTA
_COST = 8.0  # kernels: more than by what takes packed weights as they are
PIECE = 1 << 27  # weights in 16 bits at a time, 256 MB, where their outputs stand alone


@op("values[_,_]:i32")
def unpacked(
    values: Tensor, groups: Groups, dtype: torch.dtype, factors: Tensor | None = None
) -> Tensor:
    """Return packed weights in 16 bits, `[m, k]`, each rounded once; inputs as the codes lie.

    Args:
        values: packed codes.
        groups: what belongs to them.
        dtype: fp16 or bf16; that of scales of e2m1.
        factors: of rows, `[m]` f32.
    """
    weight = dense(values, groups)
    return (weight if factors is None else weight * factors[:, None]).to(dtype)


@unpacked.cuda
def _unpacked(
    values: Tensor, groups: Groups, dtype: torch.dtype, factors: Tensor | None = None
) -> Tensor:
    packing = groups.packing
    jit.require(dtype in DTYPES, "unpacked: {} is not of 16 bits", dtype)
    jit.require(packing.inputs % 8 == 0, "unpacked: {} inputs are no multiple of 8", packing.inputs)
    out = torch.empty((packing.outputs, packing.inputs), dtype=dtype, device=values.device)
    jit.launch(
        _variant(dtype, packing),
        "unpacked",
        (-(-packing.tiles * packing.blocks // _WARPS),),
        _WARPS * 32,
        values,
        groups.scales,
        groups.zeros,
        factors,
        out,
        packing.inputs,
        packing.outputs,
        packing.tiles,
        packing.groups,
        packing.group_factor,
        overlaps=True,
    )
    return out


def _variant(dtype: torch.dtype, packing: Packing) -> jit.Variant:
    return jit.variant("gemm/unpacked.cu", dtype, **defines(packing))


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in DTYPES:
        for packing in all_packings(dtype):
            yield _variant(dtype, packing)


def takes(spec: Spec) -> str | None:
    """Say why a product is not computed by way of 16 bits; None: it is."""
    if (why := type_refusal(spec)) is not None:
        return why
    return "takes multiples of 8 inputs" if spec.inputs % 8 else None


@gemm.implementation("unpacked", "cuda", takes=takes, cost=_COST)
def by_16_bits(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on the GPU: unpack, then what multiplies with 16 bits."""
    groups = around.groups
    assert groups is not None, "weights are packed"
    rows, packing = arranged(x, groups), groups.packing
    step = outputs_at_once(packing, not around.gate and around.residual is None)
    if step == packing.outputs:
        return _product(rows, weight, around)
    y = torch.empty((len(x), packing.outputs), dtype=x.dtype, device=x.device)
    for first in range(0, packing.outputs, step):
        here = slice(first, min(first + step, packing.outputs))
        tiles = slice(first // TILE, -(-here.stop // TILE))
        y[:, here] = _product(rows, weight[tiles], _of_tiles(around, tiles, here))
    return y


def outputs_at_once(packing: Packing, are_alone: bool) -> int:
    """Return the outputs whose weights are in 16 bits at a time: whole tiles, or all of them.

    `are_alone`: whether neither a gate nor a residual sum follows the product.
    """
    if not are_alone or packing.outputs * packing.inputs <= PIECE:
        return packing.outputs
    return max(1, PIECE // (packing.inputs * TILE)) * TILE


def _product(rows: Tensor, weight: Tensor, around: Around) -> Tensor:
    """Multiply rows whose inputs come as the codes lie."""
    assert around.groups is not None, "weights are packed"
    matrix = Matrix(unpacked(weight, around.groups, rows.dtype, around.columns))
    return linear(rows, matrix, around._replace(groups=None, columns=None))


def _of_tiles(around: Around, tiles: slice, outputs: slice) -> Around:
    """Return what is around the product of some tiles, which have these outputs."""
    groups, bias, columns = around.groups, around.bias, around.columns
    assert groups is not None, "weights are packed"
    own = groups.packing._replace(outputs=outputs.stop - outputs.start)
    zeros = None if groups.zeros is None else groups.zeros[tiles]
    return around._replace(
        groups=Groups(own, groups.scales[tiles], zeros),
        bias=None if bias is None else bias[outputs],
        columns=None if columns is None else columns[outputs],
    )
