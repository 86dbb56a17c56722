"""Which kernels multiply with the weights of experts on a device, and why the others do not."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.elementwise.eight_bits import E4M3
from slipstream.kernels.experts import down_add, grouped, packed
from slipstream.kernels.experts.grouped import ExpertMatrix, ExpertSpec, tiles_of
from slipstream.kernels.experts.sm90 import streamed
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import Target


class ExpertProduct(NamedTuple):
    """Rows, and the weights of the experts that are chosen for them; tensors need no numbers."""

    num_rows: int
    top_k: int
    matrix: ExpertMatrix
    dtype: torch.dtype  # of rows
    is_gated: bool  # gates and ups; else outputs of pairs
    tile_rows: int
    target: Target
    deterministic: bool = False

    @property
    def rows(self) -> Tensor:
        """Return what is multiplied: rows of the step, or places."""
        count = self.num_rows if self.is_gated else self.num_rows * self.top_k
        return torch.empty(count, self.matrix.inputs, dtype=self.dtype, device="meta")


def answers(product: ExpertProduct) -> list[tuple[str, str | None]]:
    """Return each kernel's name and why it is not taken; the one that is comes first, with None."""
    found = _on_cpu(product) if product.target.device == "cpu" else _on_gpu(product)
    return sorted(found, key=lambda answer: answer[1] is not None)


def _on_cpu(product: ExpertProduct) -> list[tuple[str, str | None]]:
    matrix, x = product.matrix, product.rows
    packing = None if matrix.groups is None else matrix.groups.packing
    device = torch.device("cpu")
    spec = ExpertSpec(x.shape, matrix.values.shape, x.dtype, matrix.values.dtype, device, packing)
    op = grouped.gate_up if product.is_gated else grouped.down
    found = op.implementations.answers(spec, product.target)
    own = [each for each in found if each.implementation.device == "cpu"]
    first = next((each for each in own if each.refusal is None), None)
    return [
        (
            each.implementation.name,
            each.refusal
            if each.refusal or first is None or each is first
            else f"costs {each.cost:g}, not {first.cost:g}",
        )
        for each in own
    ]


def _on_gpu(product: ExpertProduct) -> list[tuple[str, str | None]]:
    matrix, rows = product.matrix, product.tile_rows
    found: dict[str, str | None] = {}
    if not product.is_gated:
        found["down_add"] = down_add.refusal(product.num_rows, rows, matrix)
    also_adds = found.get("down_add", "") is None
    is_fp8 = matrix.values.dtype == E4M3
    for name, sizes in tiles_of(product.target, product.deterministic, is_fp8).items():
        reason = _not_by_tiles(product, name, sizes)
        found[name] = "down_add also adds the outputs" if also_adds and not reason else reason
    found["packed"] = None if matrix.groups is not None else "takes packed weights"
    name = next(name for name, reason in found.items() if reason is None)
    found[name] = _refusal(product)
    return [*found.items()]


def _not_by_tiles(product: ExpertProduct, name: str, sizes: tuple[int, ...]) -> str | None:
    """Say why a kernel with tiles of these sizes is not taken; None: it is."""
    if product.matrix.groups is not None:
        return "takes weights that are not packed"
    if not sizes:
        return _without_tiles(product, name)
    is_taken = product.tile_rows in sizes
    return None if is_taken else f"takes tiles of {_listed(sizes)} rows, not {product.tile_rows}"


def _without_tiles(product: ExpertProduct, name: str) -> str:
    """Say why a kernel has no tiles of any size there."""
    is_fp8 = product.matrix.values.dtype == E4M3
    refusal = streamed.refusal(product.target, product.deterministic, is_fp8)
    if name == "streamed" and refusal is not None:
        return refusal
    if refusal is None:
        return "streamed takes tiles of all sizes"
    return "adds in an order of its own" if product.deterministic else "needs sm_90a"


def _refusal(product: ExpertProduct) -> str | None:
    """Say why a kernel that tiles choose does not take the sizes; None: it does."""
    name, matrix, streams = "experts", product.matrix, 1 + product.is_gated
    try:
        if matrix.groups is None:
            grouped.check(name, product.rows, matrix.values, matrix.outputs // streams)
        else:
            packed.check(name, product.rows, matrix.groups.packing, streams)
    except KernelError as error:
        return str(error).removeprefix(f"{name}: ")
    return None


def _listed(sizes: tuple[int, ...]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}" if others else last
