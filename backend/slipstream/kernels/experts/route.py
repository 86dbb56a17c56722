"""Routing: the experts of each row, their weights, and rows in the order of experts.

A row and one of its experts are a pair; pair `row * k + rank`. Pairs are put in the order of their
experts, those of one expert in the order of pairs: each has a place. GEMMs walk the places of an
expert in tiles. Only the device knows which tiles there are, so their list has room for as many as
there can be.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.experts.spec import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, Routing, Score
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_PAIRS_OF_ONE = 128  # that one CTA routes
_THREADS = 512
VALUES = (1, 2, 4, 8, 16)  # experts of a lane


class Routed(NamedTuple):
    """The choice of a router."""

    experts: Tensor  # [n, k] i32
    weights: Tensor  # [n, k] f32
    order: Tensor  # [n * k] i32: the pair at each place
    offsets: Tensor  # [e + 1] i32: the first place of each expert, and the end
    tiles: Tensor  # [t, 4] i32: expert, first place, places; zeros behind the last
    tile_rows: int  # places of a tile at most

    @property
    def top_k(self) -> int:
        """Experts of a row."""
        return self.experts.shape[1]


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Count the tiles that there may be at most: experts that have rows, and full tiles."""
    active = min(num_pairs, num_experts)
    return active + (num_pairs - active) // tile_rows


@op("logits[n,e]:L", package=__package__)
def route(
    logits: Tensor, routing: Routing, tile_rows: int, correction: Tensor | None = None
) -> Routed:
    """Choose experts; of equal scores the expert of the lower number.

    Args:
        logits: of the router.
        routing: how to choose.
        tile_rows: of the GEMMs that follow.
        correction: `[e] f32`, added to the scores by which experts are chosen.
    """
    experts, weights = choose(logits.float(), routing, correction)
    return placed(experts, weights, routing.num_experts, tile_rows)


def placed(experts: Tensor, weights: Tensor, num_experts: int, tile_rows: int) -> Routed:
    """Put the pairs of a choice in order, and list the tiles."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tiles = torch.zeros(most_tiles(len(flat), num_experts, tile_rows), 4, dtype=torch.int32)
    found = [
        (expert, first, min(tile_rows, end - first))
        for expert, (begin, end) in enumerate(itertools.pairwise(offsets.tolist()))
        for first in range(begin, end, tile_rows)
    ]
    if found:
        tiles[: len(found), :3] = torch.tensor(found, dtype=torch.int32)
    return Routed(experts.int(), weights, order.int(), offsets.int(), tiles, tile_rows)


def choose(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, `[n, k] i64`, and their weights, fp32: the definition."""
    if routing.score is Score.SPARSEMIXER:
        experts, weights = _sparsemixer(logits, routing)
    else:
        is_softmax = routing.score is Score.SOFTMAX
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        plain = logits if is_softmax else scores
        by = plain if correction is None else scores + correction
        if routing.groups > 1:
            by = _of_best_groups(by, routing)
        experts = by.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = scores.gather(1, experts)
    if routing.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * routing.factor


def _of_best_groups(by: Tensor, routing: Routing) -> Tensor:
    """Hide the experts outside of the best groups, of equal ones those of lower numbers."""
    grouped = by.view(len(by), routing.groups, routing.num_experts // routing.groups)
    counted = 1 if routing.score is Score.SOFTMAX else 2
    best = grouped.topk(counted, dim=-1).values.sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    is_hidden = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, value=False)
    return grouped.masked_fill(is_hidden[..., None], float("-inf")).flatten(1)


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Take the best of what is left `top_k` times, weighed among what is near it."""
    left = logits.clone()
    experts, weights = [], []
    for _ in range(routing.top_k):
        best = left.amax(-1, keepdim=True)
        expert = (left == best).int().argmax(-1, keepdim=True)
        factor = torch.maximum(logits.abs(), best)
        is_far = (best - logits) / factor > 2 * routing.jitter
        near = left.masked_fill(is_far, float("-inf")).softmax(-1)
        experts.append(expert)
        weights.append(near.gather(1, expert))
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(experts, 1), torch.cat(weights, 1)


# ---- on a GPU ----


def _variant(dtype: torch.dtype, values: int, is_grouped: bool) -> jit.Variant:
    return jit.variant("experts/route.cu", dtype, VALUES=values, GROUPED=int(is_grouped))


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    for dtype in jit.DTYPES:
        for values, is_grouped in itertools.product(VALUES, (False, True)):
            yield _variant(dtype, values, is_grouped)


def values_of(routing: Routing) -> int:
    """Return how many experts a lane has."""
    return next(v for v in VALUES if 32 * v >= routing.num_experts)


def empty(num_rows: int, routing: Routing, tile_rows: int, device: torch.device) -> Routed:
    """Return room for a choice; `KernelError` for one that no kernel makes."""
    num_experts, top_k = routing.num_experts, routing.top_k
    jit.require(num_experts <= MAX_EXPERTS, "route: {} experts > {}", num_experts, MAX_EXPERTS)
    jit.require(top_k <= min(MAX_TOP_K, num_experts), "route: {} experts of a row", top_k)
    jit.require(routing.groups <= MAX_GROUPS, "route: {} groups > {}", routing.groups, MAX_GROUPS)
    pairs = num_rows * top_k

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=device)
    tiles = ints(most_tiles(pairs, num_experts, tile_rows), 4)
    return Routed(
        ints(num_rows, top_k), weights, ints(pairs), ints(num_experts + 1), tiles, tile_rows
    )


def how_to_choose(
    routed: Routed, routing: Routing, correction: Tensor | None
) -> tuple[jit.Argument, ...]:
    """Return what kernels take as HOW_TO_CHOOSE (choice.cuh)."""
    return (
        correction,
        *(routed.experts, routed.weights),
        *(len(routed.experts), routing.num_experts, routing.top_k),
        *(routing.score.value, int(routing.normalises), routing.factor, 2 * routing.jitter),
        *(routing.groups, routing.top_groups),
    )


def where_to_place(routed: Routed) -> tuple[Tensor | int, ...]:
    """Return what kernels take as WHERE_TO_PLACE (choice.cuh)."""
    return (routed.order, routed.offsets, routed.tiles, len(routed.tiles), routed.tile_rows)


@route.cuda
def _route(
    logits: Tensor, routing: Routing, tile_rows: int, correction: Tensor | None = None
) -> Routed:
    """Launch one CTA where there are few pairs, else a warp a row and then a CTA an expert."""
    num_rows, num_experts = logits.shape
    jit.type_name(logits.dtype)
    jit.require(logits.stride(1) == 1, "route: elements of a row must be contiguous")
    routed = empty(num_rows, routing, tile_rows, logits.device)
    if num_rows == 0:
        routed.offsets.zero_()
        return routed
    wanted = _variant(logits.dtype, values_of(routing), routing.groups > 1)
    chosen = (logits, logits.stride(0), *how_to_choose(routed, routing, correction))
    planned = where_to_place(routed)
    pairs = len(routed.order)
    if pairs <= _PAIRS_OF_ONE:
        once = (*chosen, *planned)
        jit.launch(wanted, "route_once", (1,), _THREADS, *once, overlaps=True)
        return routed
    jit.launch(wanted, "choose", (-(-num_rows // 4),), 128, *chosen, overlaps=True)
    places = (routed.experts, pairs, num_experts, *planned)
    jit.launch(wanted, "place", (num_experts,), _THREADS, *places, overlaps=True)
    return routed
