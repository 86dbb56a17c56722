"""The kernels of a model's mixtures of experts, as `slipstream kernels` prints them.

A model is one of tensors without data, as `matrices.py` makes it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from slipstream.kernels.experts import router, table
from slipstream.kernels.experts.grouped import ExpertMatrix
from slipstream.kernels.experts.table import ExpertProduct
from slipstream.kernels.runtime import team
from slipstream.kernels.runtime.registry import Target
from slipstream.layers.decoder import Decoder
from slipstream.layers.experts import Experts
from slipstream.layers.linear import Linear
from slipstream.layers.norm import Norm
from slipstream.runner.matrices import Weight, linear_weight


class Mixture(NamedTuple):
    """Layers of experts that are alike."""

    layer: Experts
    takes_norm: bool  # whether the router's kernel can compute the norm before it
    dtype: torch.dtype  # of rows
    num_layers: int

    @property
    def linears(self) -> list[Weight]:
        """Return the matrices that GEMMs multiply with: the router, and a shared expert's."""
        found = [("router", self.layer.router)]
        if (shared := self.layer.shared) is not None:
            found += [("shared gate_up", shared.gate_up), ("shared down", shared.down)]
        return [linear_weight(name, each, self.dtype, self.num_layers) for name, each in found]


def mixtures_of(layers: Sequence[Experts], decoder: Decoder, dtype: torch.dtype) -> list[Mixture]:
    """Return what is alike once, in the order of the layers."""
    found: dict[object, list[Experts]] = {}
    for layer in layers:
        both = _kind(layer.gate_up), _kind(layer.down)
        found.setdefault((layer.config, *both, _sizes(layer)), []).append(layer)
    takes_norm = isinstance(decoder.norm, Norm)
    return [Mixture(each[0], takes_norm, dtype, len(each)) for each in found.values()]


def _sizes(layer: Experts) -> object:
    linears: list[Linear] = [layer.router]
    if layer.shared is not None:
        linears += [layer.shared.gate_up, layer.shared.down]
    return tuple(each.scheme.name for each in linears)


def _kind(matrix: ExpertMatrix) -> tuple[object, ...]:
    packing = None if matrix.groups is None else matrix.groups.packing
    return (*matrix.values.shape, matrix.values.dtype, packing)


def report(
    mixture: Mixture, rows: Sequence[int], target: Target, deterministic: bool
) -> Iterator[str]:
    """Make the lines of a mixture: what chooses experts, and what multiplies with their weights."""
    yield from _of_router(mixture, rows, target)
    layer = mixture.layer
    routing = layer.config.routing
    for name, matrix, is_gated in (("gate_up", layer.gate_up, True), ("down", layer.down, False)):
        packing = None if matrix.groups is None else matrix.groups.packing
        kind = str(matrix.values.dtype).removeprefix("torch.") if packing is None else packing
        stages = f"GEMM, {layer.config.gate.name.lower()}" if is_gated else "GEMM, sum of experts"
        shape = f"{routing.num_experts} of [{matrix.outputs}, {matrix.inputs}] {kind}"
        yield f"experts {name}: {mixture.num_layers} x {shape}: {stages}"
        for num_rows in rows:
            tile = layer.tile_rows(num_rows, target, deterministic)
            given = num_rows, routing.top_k, matrix, mixture.dtype, is_gated, tile
            (best, refusal), *others = table.answers(ExpertProduct(*given, target, deterministic))
            if refusal is not None:
                others = [(best, refusal), *others]
                best = "none"
            elif target.device != "cpu":
                behind = " + combine" if not is_gated and best != "down_add" else ""
                best += f", tiles of {tile} rows{behind}"
            yield f"  {num_rows:5}  {best}"
            for other, reason in others:
                yield f"         not {other}: {reason}"


def _of_router(mixture: Mixture, rows: Sequence[int], target: Target) -> Iterator[str]:
    """Make the lines of the choice of experts by the router's kernel, where it has one."""
    routing = mixture.layer.config.routing
    choice = f"{routing.top_k} of {routing.num_experts} experts"
    yield f"choice: {mixture.num_layers} x {choice}: norm, router, choice"
    for num_rows in rows:
        reason = _not_by_router(mixture, num_rows, target)
        if reason is None:
            yield f"  {num_rows:5}  router"
            continue
        yield f"  {num_rows:5}  norm + GEMM of router + route"
        yield f"         not router: {reason}"


def _not_by_router(mixture: Mixture, num_rows: int, target: Target) -> str | None:
    """Say why the router's kernel does not choose; None: it does."""
    matrix = mixture.layer.router.matrix
    if target.device == "cpu":
        return "runs on GPUs"
    if not mixture.takes_norm or matrix is None:
        return "takes an RMS norm"
    if not team.has_teams(target):
        return "needs teams of CTAs: sm_90a and later"
    width = matrix.values.shape[1]
    rows = torch.empty(num_rows, width, dtype=mixture.dtype, device="meta")
    return router.refusal(rows, matrix.values)
