"""Read keys and values of virtual tokens: prefix tuning (Li and Liang, 2021)."""

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.layers.adapted import Term
from slipstream.layers.adapted_rows import keys_of
from slipstream.models.adapters.targets import Part, Targets

_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


def key_terms(
    table: Tensor, targets: Targets, dtype: torch.dtype, where: str
) -> list[dict[str, list[Term]]]:
    """Return the terms of all layers of a table `[tokens, layers * 2 * width]`, as PEFT writes it:
    of each layer keys, as attention sees them, and then values. Each rank has those of its layers
    and heads.

    Raises `CheckpointError`, which `where` begins.
    """
    why = targets.key_refusal
    count = targets.num_layers
    layers = [[targets.of_decoder(layer, name) for name in _QKV] for layer in range(count)]
    found = [[part for part in parts if part is not None] for parts in layers]
    if not why and any(len(parts) < len(_QKV) for parts in found):
        why = "not every layer has keys and values of its own"
    if why:
        raise CheckpointError(f"{where}: prefix tuning is not implemented: {why}")
    rows, width = table.to(dtype), table.shape[1] // (2 * count)
    terms: list[dict[str, list[Term]]] = [{} for _ in range(targets.num_ranks)]
    for number, parts in enumerate(found):
        orders = [_order(part, parts, width) for part in parts[1:]]
        if table.shape[1] != 2 * count * width or None in orders:
            raise CheckpointError(
                f"{where}: the rows are {list(table.shape)}: no keys and values of {count} layers "
                f"of this model"
            )
        own = torch.split(rows[:, 2 * number * width :][:, : 2 * width], width, 1)
        sides = [
            _taken(x, order) for x, order in zip(own, orders, strict=True) if order is not None
        ]
        for part_of, rank in enumerate(targets.ranks_of(keys_of(number))):
            heads = [
                part.cuts[part_of].of_outputs(side.t()).t()
                for part, side in zip(parts[1:], sides, strict=True)
            ]
            terms[rank][keys_of(number)] = [Term(0, None, torch.cat(heads, 1).contiguous())]
    return terms


def _order(part: Part, qkv: list[Part], width: int) -> Tensor | None:
    """Return which of `width` stored numbers each of a part's is, -1: none; None: they do not fit.

    What the decoder makes of the rows of a stored matrix says it. Those of keys, of values or of
    both with queries are in one order in every layout.
    """
    q, k, _ = qkv
    is_fused = q.stored == k.stored
    stored = width * q.outputs // k.outputs + 2 * width if is_fused else width
    try:
        index = part.of_b(torch.arange(1.0, stored + 1)[:, None])[:, 0].long()
    except (RuntimeError, IndexError):  # a view of other sizes
        return None
    used = torch.unique(index[index > 0])
    if len(index) != part.outputs or len(used) != width:
        return None
    return torch.where(index > 0, torch.searchsorted(used, index), -1)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Return the columns of `[tokens, width]` in an order; -1: zeros."""
    return torch.where(order >= 0, x[:, order.clamp(min=0)], 0.0).to(x.dtype)
