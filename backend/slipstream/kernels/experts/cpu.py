"""GEMMs of experts by the processor's kernels: rows of fp32 with weights in tiles.

All experts of a step are one loop of tiles, which threads share out. A row's bits do not depend on
the others, so deterministic mode needs nothing else.
"""

import torch
from torch import Tensor

from slipstream.kernels.cpu.native import (
    Choice,
    Experts,
    Places,
    Sum,
    address,
    library,
    loaded,
    num_threads,
)
from slipstream.kernels.experts.combine import Shared, combine
from slipstream.kernels.experts.grouped import Added, ExpertMatrix, ExpertSpec, down, gate_up
from slipstream.kernels.experts.route import Routed, choose, most_tiles, route
from slipstream.kernels.experts.spec import Gate, Routing, Score
from slipstream.kernels.gemm.cpu_packed import product_of
from slipstream.kernels.gemm.cpu_packing import LAYOUT
from slipstream.kernels.gemm.op import PLAIN, Around

GATES = {Gate.SILU: "silu", Gate.CLAMPED: "clamped"}


def _takes(spec: ExpertSpec) -> str | None:
    if spec.packing is None or spec.packing.layout != LAYOUT:
        return "takes weights in tiles"
    return None if spec.dtype == torch.float32 else "takes rows of fp32"


def experts_of(
    matrix: ExpertMatrix, top_k: int, around: Around = PLAIN, routed: Routed | None = None
) -> Experts:
    """Return the structure of a product, without a choice or of the places of one.

    Tensors must stay alive.
    """
    values, groups = matrix.values, matrix.groups
    assert groups is not None, "weights are packed"
    own = values, groups.scales, groups.minimums
    strides = (0 if x is None else x.stride(0) * x.itemsize for x in own)
    places: tuple[int | None, int | None] = None, None
    if routed is not None:
        places = routed.order.data_ptr(), routed.offsets.data_ptr()
    product = product_of(values, groups, around._replace(bias=matrix.bias)).contents
    return Experts(product, *strides, *places, None, len(values), top_k, None, None)


def choice_of(routing: Routing, correction: Tensor | None) -> Choice | None:
    """Return the structure of a choice; None: the kernel has none such."""
    if routing.score is Score.SPARSEMIXER or routing.groups > 1:
        return None
    how = routing.num_experts, routing.top_k, routing.score.value, routing.normalises
    return Choice(address(correction), *how, routing.factor, 0)


def _run(x: Tensor, experts: Experts, num_places: int, width: int) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(num_places, width, dtype=x.dtype)
    if num_places:
        sizes = y.data_ptr(), y.stride(0), num_threads()
        loaded().experts(experts, x.data_ptr(), x.stride(0), *sizes)
    return y


@gate_up.implementation("C++", "cpu", takes=_takes, cost=0.5)
def _gate_up(
    x: Tensor,
    values: Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    gate: Gate,
    deterministic: bool = False,
    added: Added | None = None,
) -> Tensor:
    experts = experts_of(matrix, routed.top_k, Around(gate=GATES[gate]), routed)
    if added is not None:
        experts.added, experts.marks = added.values.data_ptr(), added.marks.data_ptr()
    return _run(x, experts, len(routed.order), matrix.outputs // 2)


@down.implementation("C++", "cpu", takes=_takes, cost=0.5)
def _down(
    x: Tensor, values: Tensor, matrix: ExpertMatrix, routed: Routed, deterministic: bool = False
) -> Tensor:
    experts = experts_of(matrix, routed.top_k, routed=routed)
    experts.weights = routed.weights.data_ptr()
    return _run(x, experts, len(routed.order), matrix.outputs)


def _takes_terms(spec: tuple[tuple[object, ...], ...]) -> str | None:
    if library() is None:
        return "needs the CPU kernels"
    return None if spec[0][1] == torch.float32 else "takes rows of fp32"


@combine.implementation("C++", "cpu", takes=_takes_terms, cost=0.5)
def _combine(residual: Tensor, terms: Tensor, shared: Shared | None = None) -> Tensor:
    num_rows, width = residual.shape
    if residual.stride(1) != 1 or not terms.is_contiguous():
        return combine.oracle(residual, terms, shared)
    values, gate, gate_stride = None, None, 0
    if shared is not None:
        values, gate = shared.values.contiguous(), shared.gate
        gate_stride = 0 if gate is None else gate.stride(0)
    if residual.numel():
        where = terms.data_ptr(), address(values), address(gate), residual.data_ptr()
        sizes = residual.stride(0), gate_stride, num_rows, width, len(terms) // num_rows, 0
        loaded().combine(Sum(*where, *sizes), num_threads())
    return residual


def _takes_choice(spec: object) -> str | None:
    return None if library() is not None else "needs the CPU kernels"


@route.implementation("C++", "cpu", takes=_takes_choice, cost=0.5)
def _route(
    logits: Tensor, routing: Routing, tile_rows: int, correction: Tensor | None = None
) -> Routed:
    """Choose by the kernel, or by torch as the definition does; places are counted."""
    choice = choice_of(routing, correction)
    if choice is None or logits.dtype != torch.float32 or logits.stride(1) != 1:
        chosen, weights = choose(logits.float(), routing, correction)
        experts = chosen.int()
    else:
        shape = len(logits), routing.top_k
        experts = torch.empty(shape, dtype=torch.int32)
        weights = torch.empty(shape, dtype=torch.float32)
        sizes = logits.stride(0), len(logits), experts.data_ptr(), weights.data_ptr()
        loaded().choose_experts(choice, logits.data_ptr(), *sizes)
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32)
    offsets = torch.empty(routing.num_experts + 1, dtype=torch.int32)
    num_tiles = most_tiles(pairs, routing.num_experts, tile_rows)
    tiles = torch.zeros(num_tiles, 4, dtype=torch.int32)
    where = (x.data_ptr() for x in (experts, order, offsets, tiles))
    loaded().place(Places(*where, pairs, routing.num_experts, tile_rows, 0))
    return Routed(experts, weights, order, offsets, tiles, tile_rows)
