"""Rows of packed weights by their numbers, in 16 bits: an embedding that stays in fewer bits.

A row is read where GEMMs read it: of the 16 rows of its tile, half of the bytes that hold eight of
them are another's, which is nothing beside a step. So a matrix that is embedding and head, too, is
in memory once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.kernels.gemm.packed import DTYPES, all_packings, defines
from slipstream.kernels.gemm.packing import TILE, Groups, Packing, dense
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_WARPS = 4  # of a CTA
_ROWS = 8  # of a warp
_PIECE = 8  # inputs that rows are multiples of


@op("values[_,_]:i32, ids[n]:i64")
def lookup(
    values: Tensor,
    ids: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Tensor:
    """Return rows `ids` of packed weights, `[n, k]`, each number rounded once.

    Args:
        values: packed codes of `m` rows.
        ids: of 0 to `m - 1`.
        groups: what belongs to the codes; inputs are as they lie.
        dtype: fp16 or bf16; that of scales of e2m1.
        factors: of rows, `[m]` f32.
    """
    if not len(ids):
        return torch.empty((0, groups.packing.inputs), dtype=dtype, device=values.device)
    tiles = ids // TILE
    zeros = None if groups.zeros is None else groups.zeros[tiles]
    own = groups.packing._replace(outputs=len(ids) * TILE)
    rows = dense(values[tiles], Groups(own, groups.scales[tiles], zeros))
    found = rows[torch.arange(len(ids), device=ids.device) * TILE + ids % TILE]
    return (found if factors is None else found * factors[ids][:, None]).to(dtype)


@lookup.cuda
def _lookup(
    values: Tensor,
    ids: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Tensor:
    packing = groups.packing
    why = refusal(packing, dtype)
    jit.require(why is None and groups.is_plain, "lookup: {}", why or "inputs in another order")
    ids = ids.contiguous()
    out = torch.empty((len(ids), packing.inputs), dtype=dtype, device=values.device)
    if not len(ids):
        return out
    warps = -(-len(ids) // _ROWS) * packing.blocks
    jit.launch(
        _variant(dtype, packing),
        "lookup",
        (-(-warps // _WARPS),),
        _WARPS * 32,
        values,
        groups.scales,
        groups.zeros,
        factors,
        ids,
        out,
        len(ids),
        packing.inputs,
        packing.groups,
        packing.group_factor,
        overlaps=True,
    )
    return out


def refusal(packing: Packing, dtype: torch.dtype) -> str | None:
    """Say why rows of packed weights are not looked up in a dtype; None: they are."""
    if dtype not in DTYPES:
        return f"rows of {dtype}, not of fp16 or bf16"
    if packing.for_e4m3:
        return "codes for rows of e4m3"
    if packing.scales_numbers and packing.scale != dtype:
        return "scales of e2m1 are of another type than the rows"
    is_whole = packing.inputs % _PIECE == 0
    return None if is_whole else f"{packing.inputs} inputs are no multiple of {_PIECE}"


def _variant(dtype: torch.dtype, packing: Packing) -> jit.Variant:
    return jit.variant("gemm/lookup.cu", dtype, **defines(packing))


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in DTYPES:
        for packing in all_packings(dtype):
            yield _variant(dtype, packing)
