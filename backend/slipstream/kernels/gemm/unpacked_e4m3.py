"""GEMMs of many rows of e4m3 with packed weights: the weights in e4m3, too, for one product.

Codes are e4m3, or integers of 4 bits, which are exact in e4m3, and cuBLASLt scales sums of 128
inputs (`cublaslt_groups.py`): so this is the product that the packed weights stand for. Scales of
rows, and what follows, are left to its reader. The matrix takes memory while its product runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels.gemm import cublaslt_groups, packed_routes
from slipstream.kernels.gemm.cublaslt_groups import GROUP, MULTIPLE, matmul_by_groups
from slipstream.kernels.gemm.op import E4M3, PLAIN, Around, Spec, gemm
from slipstream.kernels.gemm.packed import SCALES, defines
from slipstream.kernels.gemm.packing import MIDDLE, Groups, Packing, by_row, unpack
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

MIN_ROWS = 257  # more than any GEMM of the deterministic mode has: a row's bits depend on the rows
_WARPS = 4  # of a CTA


@op("values[_,_]:i32")
def unpacked_e4m3(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return packed weights as e4m3 `[m, k]`, and scales `[ceil(k / 128), m]` f32.

    Args:
        values: codes of e4m3, or of 4 bits packed for rows of e4m3.
        groups: what belongs to them; a group is a multiple of 128 inputs.
    """
    packing = groups.packing
    codes = unpack(values, packing)
    numbers = (
        codes.view(E4M3) if packing.code_type == "e4m3" else (codes.float() - MIDDLE[4]).to(E4M3)
    )
    wide = packing._replace(inputs=packing.blocks * GROUP)
    scales = by_row(groups.scales, wide)[:, ::GROUP].T.float().contiguous()
    return numbers, scales


@unpacked_e4m3.cuda
def _unpacked_e4m3(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    packing, device = groups.packing, values.device
    why = packing_refusal(packing)
    jit.require(why is None, "unpacked_e4m3: {}", why)
    is_whole = packing.inputs % MULTIPLE == 0
    jit.require(is_whole, "unpacked_e4m3: {} inputs, no multiple of 16", packing.inputs)
    codes = torch.empty((packing.outputs, packing.inputs), dtype=E4M3, device=device)
    scales = torch.empty((packing.blocks, packing.outputs), dtype=torch.float32, device=device)
    jit.launch(
        _variant(packing),
        "unpacked_e4m3",
        (-(-packing.tiles * packing.blocks // _WARPS),),
        _WARPS * 32,
        values,
        groups.scales,
        codes,
        scales,
        packing.inputs,
        packing.outputs,
        packing.tiles,
        packing.groups,
        packing.group_factor,
        overlaps=True,
    )
    return codes, scales


def _variant(packing: Packing) -> jit.Variant:
    return jit.variant("gemm/unpacked_e4m3.cu", torch.bfloat16, **defines(packing))


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for scale in SCALES:
        yield _variant(Packing(4, GROUP, 4096, 4096, scale, False, for_e4m3=True))
        yield _variant(Packing(8, GROUP, 4096, 4096, scale, False, "e4m3"))


def packing_refusal(packing: Packing | None) -> str | None:
    """Say why weights are not put into e4m3; None: they are."""
    if packing is None or not packing.takes_e4m3:
        return "takes packed weights whose rows may be e4m3"
    return None if packing.parts == 1 else f"takes groups of multiples of {GROUP} inputs"


def takes(spec: Spec) -> str | None:
    """Say why a product is not computed by way of e4m3; None: it is."""
    if (why := packing_refusal(spec.packing)) is not None:
        return why
    if spec.x != E4M3 or spec.out != torch.bfloat16:
        return "takes rows of e4m3, for a model in bf16"
    if spec.rows < MIN_ROWS:
        return f"takes {MIN_ROWS} rows at least"
    if spec.scales or spec.norm or spec.bias or spec.gate or spec.residual:
        return "leaves scales, and what follows them, to its reader"
    if not (spec.x_aligned and spec.weight_aligned):
        return "takes what is aligned to 16 bytes"
    return cublaslt_groups.refusal(spec.rows, spec.inputs, spec.outputs, spec.target)


@gemm.implementation(
    "unpacked_e4m3", "cuda", "sm_90a", takes=takes, cost=packed_routes.cost("unpacked_e4m3")
)
def by_e4m3(x: Tensor, weight: Tensor, around: Around = PLAIN) -> Tensor:
    """`gemm` on a Hopper, of inputs as the codes lie: unpack, then cuBLASLt."""
    assert around.groups is not None, "weights are packed"
    return matmul_by_groups(x, *unpacked_e4m3(weight, around.groups))
