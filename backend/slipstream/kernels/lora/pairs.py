"""Groups of a step's pairs of rows and experts, by which `terms.py` adds what adapters have there.

A group is of up to `TILE` pairs that have one adapter and one expert. Only the device knows which
these are. Pairs lie in the order of experts (`kernels/experts/route.py`), and in a prompt those of
an expert have one adapter; groups are divided where an adapter follows another, and at every
`TILE`th place, so that each is found where it lies. A row's bits do not depend on its groups.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.lora.terms import EXPERT_WORDS, TILE
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.op import op

_THREADS = 512


class PairTable(NamedTuple):
    """The places of a step's pairs in groups; each list has an entry for each place."""

    groups: Tensor  # [p, 2] i64: as of `Table`, behind the last zeros
    rows: Tensor  # [p] i32: of the pair
    places: Tensor  # [p] i32: 0, 1, ...
    marks: Tensor  # [p] i32: 1: the row's adapter has terms of experts
    factors: Tensor  # [p] f32: the pair's weight


@op("experts[n,k]:i32, order[p]:i32, weights[n,k]:f32, addresses[n]:i64")
def group_pairs(experts: Tensor, order: Tensor, weights: Tensor, addresses: Tensor) -> PairTable:
    """Make the groups of pairs.

    Args:
        experts: of rows.
        order: the pair at each place, `p = n * k`.
        weights: of pairs.
        addresses: where the terms of experts of each row's adapter are; 0: it has none.
    """
    pairs, count = order.long(), len(order)
    rows, places = pairs // experts.shape[1], torch.arange(count)
    adapters = addresses[rows]
    terms = torch.where(adapters == 0, 0, adapters + experts.flatten()[pairs] * EXPERT_WORDS * 8)
    before = torch.nn.functional.pad(terms, (1, 0))[:count]
    begins = ((places % TILE == 0) | (terms != before)).nonzero().flatten()
    sizes = torch.nn.functional.pad(begins, (0, 1), value=count).diff()
    found = torch.stack([terms[begins], begins | sizes << 32], 1)
    found = found[found[:, 0] != 0]
    groups = torch.nn.functional.pad(found, (0, 0, 0, count - len(found)))
    given = groups, rows.int(), places.int(), (terms != 0).int()
    return PairTable(*given, weights.flatten()[pairs])


def variants() -> Iterator[jit.Variant]:
    """Yield every legal instantiation."""
    yield _variant()


def _variant() -> jit.Variant:
    return jit.variant("lora/pairs.cu", torch.bfloat16)  # any: it reads no numbers of the model


@group_pairs.cuda
def _group_pairs(experts: Tensor, order: Tensor, weights: Tensor, addresses: Tensor) -> PairTable:
    for each in (experts, weights, addresses):
        jit.require(each.is_contiguous(), "group_pairs: a choice lies in one piece")
    count, device = len(order), order.device
    groups = torch.empty((count, 2), dtype=torch.int64, device=device)
    rows, places, marks = (torch.empty_like(order) for _ in range(3))
    factors = torch.empty(count, dtype=torch.float32, device=device)
    made = PairTable(groups, rows, places, marks, factors)
    if count:
        args = experts, order, weights, addresses, count, experts.shape[1]
        grid = (-(-count // _THREADS),)
        jit.launch(_variant(), "group_pairs", grid, _THREADS, *args, *made, overlaps=True)
    return made
