"""GEMMs with packed weights of many rows: the matrix in 16 bits again, for one product.

A step of many rows reads the weights once for all of them, so that writing them and reading them
back costs little beside it. The matrix takes memory while its product runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import PLAIN, Around, Matrix, Spec, gemm
from slipstream.kernels.gemm.packed import DTYPES, all_packings, defines, type_refusal
from slipstream.kernels.gemm.packing import Groups, Packing, arranged, dense
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_WARPS = 4  # of a CTA
_COST = 8.0  # kernels: more than by what takes packed weights as they are


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
        0 if groups.zeros is None else groups.zeros,
        0 if factors is None else factors,
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
    matrix = Matrix(unpacked(weight, groups, x.dtype, around.columns))
    return linear(arranged(x, groups), matrix, around._replace(groups=None, columns=None))
